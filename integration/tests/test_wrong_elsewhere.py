"""Programs that DTensor of PyTorch 2.13 gets silently wrong, by their stories; here they are right.

Every program trains two steps on several ranks, its batch even, uneven or too short for them, and
gives the losses and the parameters of plain PyTorch, in float64 to 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sbp_aten.passes import prepare_step
from sbp_core import Cluster, Device, Link, Placement, PlanRequest, Strategy, check, compile_plan
from sbp_core.infer import infer_strategy
from sbp_core.sbp import Split
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime import ReferenceSession
from sbp_torch.runtime.configs import ReferenceConfig

Batch = Mapping[str, Tensor]

#: Of a batch of six, two and three ranks have even shards, four uneven ones, seven an empty one.
BATCH_SIZE, NUMS_OF_RANKS = 6, (2, 3, 4, 7)


def signs(target: Tensor) -> Tensor:
    return torch.where(target > 0, 1.0, -1.0).to(target.dtype)


#: Means over the batch: DTensor averages averages, which is NaN for an empty shard, and divides
#: gradients by the local number of elements, which makes them as many times too large as there are
#: ranks.
MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": functional.mse_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": functional.huber_loss,
    "l1_loss": functional.l1_loss,
    "binary_cross_entropy": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, y: functional.binary_cross_entropy_with_logits(
        x, y.sigmoid()
    ),
    "soft_margin_loss": lambda x, y: functional.soft_margin_loss(x, signs(y)),
    "cross_entropy": lambda x, y: functional.cross_entropy(x, y.argmax(1)),
    "cosine_embedding_loss": lambda x, y: functional.cosine_embedding_loss(x, y, signs(y[:, 0])),
    "mean": lambda x, y: (x * y).mean(),
    "norm": lambda x, y: (x - y).norm(dim=1).mean(),
}


class Linear(nn.Module):
    """A layer, and a loss of what it makes."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.criterion = loss

    def forward(self, batch: Batch) -> Tensor:
        return self.criterion(batch["x"] @ self.weight, batch["y"])


class Convolution(nn.Module):
    """Two convolutions, the second in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 8, 3, stride=2, groups=2)

    def forward(self, batch: Batch) -> Tensor:
        return self.second(self.first(batch["x"]).relu()).square().mean()


class Scatter(nn.Module):
    """Rows added up by an index; two rows of the result are met by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, batch: Batch) -> Tensor:
        rows = batch["x"] * self.weight
        sums = rows.new_zeros(5, 5).scatter_add(0, batch["index"], rows)
        return (sums * sums).sum()


class Lookup(nn.Module):
    """A table of rows, and a projection onto it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5, padding_idx=2)
        self.out = nn.Linear(5, 7)

    def forward(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.out(self.table(batch["index"])).mean(1), batch["y"])


@dataclass(frozen=True)
class Program:
    """A model, the example of a batch, and how its tensors are pinned."""

    make: Callable[[], nn.Module]
    batch: Batch
    pins: Mapping[str, str]


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def integers(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(2))


PAIR = {"x": reals(BATCH_SIZE, 5), "y": reals(BATCH_SIZE, 4)}
IMAGES = {"x": reals(BATCH_SIZE, 3, 7, 7)}
ROWS = {"x": reals(BATCH_SIZE, 5), "index": integers(3, BATCH_SIZE, 5)}
WORDS = {"index": integers(7, BATCH_SIZE, 3), "y": integers(7, BATCH_SIZE)}

PROGRAMS = {
    **{
        f"{name}, batch split": Program(lambda loss=loss: Linear(loss), PAIR, {"batch": "S(0)"})
        for name, loss in MEANS.items()
    },
    "cosine_embedding_loss, features split": Program(
        lambda: Linear(MEANS["cosine_embedding_loss"]), PAIR, {"batch": "S(1)"}
    ),
    "convolution, batch split": Program(Convolution, IMAGES, {"batch": "S(0)"}),
    "convolution, channels out split": Program(
        Convolution, IMAGES, {"batch": "B", "parameters": "S(0)"}
    ),
    "convolution, channels in split": Program(
        Convolution, IMAGES, {"batch": "B", "first.weight": "S(1)", "second.weight": "S(1)"}
    ),
    "convolution, space split": Program(Convolution, IMAGES, {"batch": "S(2)"}),
    "scatter_add, rows split": Program(Scatter, ROWS, {"batch": "S(0)"}),
    "scatter_add, columns split": Program(Scatter, ROWS, {"batch": "S(1)"}),
    "embedding, vocabulary split": Program(Lookup, WORDS, {"batch": "B", "parameters": "S(0)"}),
    "embedding, batch split": Program(Lookup, WORDS, {"batch": "S(0)"}),
}


def slow_devices(num_devices: int) -> Cluster:
    """Return a machine on which boxing costs next to nothing, so that what can be split is."""
    rates = {"float64": 1e3}
    return Cluster(
        name="slow",
        num_devices=num_devices,
        devices_per_node=num_devices,
        device=Device(memory_bytes=2**32, flop_per_s=rates, memory_bytes_per_s=1e3),
        intra_node=Link(latency_s=1e-9, bytes_per_s=1e12),
    )


def share_of_split_nodes(strategy: Strategy) -> float:
    """Return the part of the nodes that split a tensor."""
    tensors = [
        (*entry.signature.inputs, *entry.signature.outputs) for entry in strategy.nodes.values()
    ]
    split = [any(isinstance(sbp[0], Split) for sbp in sbps) for sbps in tensors]
    return sum(split) / len(split)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch)
    return loss


@pytest.mark.slow(but=9)
@pytest.mark.parametrize(
    "num_ranks",
    [n if n != 3 else pytest.param(n, marks=pytest.mark.exhaustive) for n in NUMS_OF_RANKS],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_and_parameters_are_those_of_one_device(name: str, num_ranks: int) -> None:
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model = program.make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    graph = prepare_step(capture(model, loss_of, program.batch, optimizer))
    mesh = Placement.grid((num_ranks,), ("ranks",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=slow_devices(num_ranks))
    strategy = infer_strategy(request, planner="test", pins=dict(program.pins))
    assert share_of_split_nodes(strategy) > 0.5, strategy
    plan = compile_plan(graph, strategy)
    check(plan)
    session = ReferenceSession(plan, initial_states(model, optimizer), ReferenceConfig())

    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, program.batch)
        loss.backward()
        optimizer.step()
        found = session.step(dict(program.batch), {"lr": 0.1})

        assert abs(found.outputs["loss"].item() - loss.item()) <= 1e-9
    states = session.state_dict()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(states[key], parameter.detach(), rtol=1e-9, atol=1e-9)
