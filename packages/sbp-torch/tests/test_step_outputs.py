"""What a step gives back: metrics of that moment, and states that nobody else holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import capture, initial_states, scalar_values
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.update_options import UpdateOptions

_Metric = Callable[[nn.Module, Tensor], Tensor]


class _Scaled(nn.Module):
    """A line times a scale, which remembers the batch that it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2).double()
        self.scale = nn.Parameter(torch.tensor(2.0).double())
        self.register_buffer("last", torch.zeros(1, 4, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x[None])
        made: Tensor = self.line(x) * self.scale
        return made


def _loss(metric: _Metric) -> Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        y = model(batch["x"])
        return {"loss": (y - batch["y"]).square().mean(), "seen": metric(model, y)}

    return loss


def _batches(rows: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(rows, 3, generator=generator, dtype=torch.float64),
            "y": torch.randn(rows, 2, generator=generator, dtype=torch.float64),
        }
        for _ in range(3)
    ]


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Scaled()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-1)


def _session(
    graph: LogicalGraph, states: dict[str, Tensor], in_place: bool, num_ranks: int = 2
) -> ReferenceSession:
    mesh = Placement.grid((num_ranks,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster())
    strategy = infer_strategy(request, planner="test", pins={"batch": "S(0)"})
    plan = compile_plan(graph, strategy, CompileOptions(in_place_states=in_place))
    return ReferenceSession(plan, states, ReferenceConfig())


def _captured(metric: _Metric, update: UpdateOptions, count: int) -> LogicalGraph:
    model, optimizer = _model()
    graph = capture(model, _loss(metric), _batches(4)[0], optimizer, update=update)
    return prepare_step(graph, count)


def _numbers(step: int, update: UpdateOptions) -> dict[str, float | int]:
    return {**scalar_values(*_model(), update), "seed": 0, "step": step}


_OF_STATES: dict[str, _Metric] = {
    "itself": lambda model, y: model.scale,
    "detached": lambda model, y: model.scale.detach(),
    "copied": lambda model, y: model.scale.detach().clone(),
    "an element": lambda model, y: model.line.bias[0],
    "a view of a view": lambda model, y: model.line.weight.t()[1].unbind(0)[0],
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", _OF_STATES)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
def test_a_metric_of_a_parameter_is_that_from_before_the_update(
    name: str, fused: bool, in_place: bool
) -> None:
    update, loss = UpdateOptions(fused=fused), _loss(_OF_STATES[name])
    graph = _captured(_OF_STATES[name], update, 1)
    session = _session(graph, initial_states(*_model(), update), in_place)
    model, optimizer = _model()

    for step, batch in enumerate(_batches(4)):
        optimizer.zero_grad()
        made = loss(model, batch)
        wanted = made["seen"].detach().clone()
        made["loss"].backward()
        optimizer.step()
        found = session.step(batch, _numbers(step, update)).outputs["seen"]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_states_do_not_lie_in_the_memory_of_the_batch() -> None:
    update = UpdateOptions()
    graph = _captured(lambda model, y: y.mean(), update, 1)
    # On one rank nothing is boxed, and so copied, on the way.
    session = _session(graph, initial_states(*_model(), update), False, num_ranks=1)
    (batch, *_) = _batches(4)
    wanted = batch["x"].clone()

    session.step(batch, _numbers(0, update))
    batch["x"].fill_(99.0)

    assert torch.equal(session.state_dict()["last"], wanted[None])


_EXTREMES: dict[str, tuple[_Metric, Callable[[list[Tensor]], Tensor]]] = {
    "max": (lambda model, y: y.max(), lambda parts: torch.stack(parts).max()),
    "amin": (lambda model, y: y.amin(), lambda parts: torch.stack(parts).min()),
    "any": (lambda model, y: (y > 3).any(), lambda parts: torch.stack(parts).any()),
    "all": (lambda model, y: (y > -2).all(), lambda parts: torch.stack(parts).all()),
    "any as a number": (
        lambda model, y: (y > 3).any().float(),
        lambda parts: torch.stack(parts).max(),
    ),
    "count": (lambda model, y: (y > 0).sum(), lambda parts: torch.stack(parts).sum()),
    "mean": (lambda model, y: y.mean(), lambda parts: torch.stack(parts).mean()),
    "of two, the mean": (
        lambda model, y: torch.maximum(y.mean(), y.sum()),
        lambda parts: torch.stack(parts).mean(),
    ),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", _EXTREMES)
def test_extremes_of_micro_batches_are_that_of_the_step(name: str) -> None:
    metric, join = _EXTREMES[name]
    update = UpdateOptions()
    graph = _captured(metric, update, 4)
    session = _session(graph, initial_states(*_model(), update), False)
    (batch, *_) = _batches(16)

    found = session.step(batch, _numbers(0, update)).outputs["seen"]

    model, _ = _model()
    parts = [metric(model, model(x)).detach() for x in batch["x"].split(4)]
    wanted = join(parts)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert len({part.item() for part in parts}) > 1
