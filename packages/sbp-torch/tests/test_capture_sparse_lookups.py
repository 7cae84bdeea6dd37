"""Embeddings with `sparse=True`: as in PyTorch with each optimizer that takes their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from sbp_core.errors import CaptureError
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.optim import CombinedOptimizer, RowWiseAdagrad
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import graph_states

ROWS, STEPS = 9, 3


class Net(nn.Module):
    """A table, looked up twice, and a linear layer."""

    def __init__(self, mode: str = "", padding: int | None = None, sparse: bool = True) -> None:
        super().__init__()
        make: dict[str, Any] = {"padding_idx": padding, "sparse": sparse}
        bag = nn.EmbeddingBag(ROWS, 3, mode=mode or "sum", **make)
        self.table: nn.Module = bag if mode else nn.Embedding(ROWS, 3, **make)
        self.head = nn.Linear(3, 1)
        self.tied = False

    def look_up(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x)
        return found if isinstance(self.table, nn.EmbeddingBag) else found.sum(1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head((self.look_up(x) * self.look_up(x + 1)).tanh())
        return made + self.table.weight.sum() if self.tied else made


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    made: Tensor = model(batch).square().mean()
    return made


def batch(index: int) -> Tensor:
    """Return places of a few rows; in the second step the last row has gradient 0 twice over."""
    return torch.randint(0, 5, (4, 2), generator=torch.Generator().manual_seed(index))


def model_of(**settings: Any) -> Net:
    torch.manual_seed(0)
    return Net(**settings).double()


def sparse_adam(model: Net) -> list[optim.Optimizer]:
    return [
        optim.SparseAdam(model.table.parameters(), lr=0.1, maximize=True),
        optim.Adam(model.head.parameters(), lr=0.1),
    ]


#: Optimizers that take sparse gradients in PyTorch.
TAKE: dict[str, Callable[[Net], list[optim.Optimizer]]] = {
    "sgd": lambda model: [optim.SGD(model.parameters(), lr=0.1)],
    "momentum": lambda model: [optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
    "adagrad": lambda model: [optim.Adagrad(model.parameters(), lr=0.1)],
    "row-wise adagrad": lambda model: [RowWiseAdagrad(model.parameters(), lr=0.1)],
    "sparse adam": sparse_adam,
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["", "sum", "mean"])
@pytest.mark.parametrize("name", TAKE)
def test_steps_equal_those_of_pytorch(name: str, mode: str, padding: int | None) -> None:
    model = model_of(mode=mode, padding=padding)
    twin = copy.deepcopy(model)
    own, theirs = TAKE[name](model), TAKE[name](twin)
    optimizer = own[0] if len(own) == 1 else CombinedOptimizer(own)

    graph = capture(model, loss, batch(0), optimizer)

    states = graph_states(graph, initial_states(model, optimizer))
    rates = dict.fromkeys(("lr", "lr.0", "lr.1"), 0.1)
    for index in range(STEPS):
        found, states = run_graph(graph, states, [{"batch": batch(index)}], rates)
        for one in theirs:
            one.zero_grad()
        wanted = loss(twin, batch(index))
        wanted.backward()
        assert twin.table.weight.grad.is_sparse
        for one in theirs:
            one.step()
        torch.testing.assert_close(found["loss"], wanted.detach(), rtol=1e-12, atol=1e-14)
        for key, value in twin.state_dict().items():
            torch.testing.assert_close(states[key], value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: optim.Adam(p), "Adam does not take the sparse gradient of 'table.weight'"),
        (lambda p: optim.AdamW(p), "AdamW does not take the sparse gradient"),
        (lambda p: optim.SGD(p, weight_decay=0.1), "weight_decay=0.1"),
        (lambda p: optim.Adagrad(p, weight_decay=0.1), "weight_decay=0.1"),
        (lambda p: RowWiseAdagrad(p, weight_decay=0.1), "weight_decay=0.1"),
    ],
)
def test_optimizers_that_refuse_sparse_gradients_are_refused_with_the_line(
    make: Callable[..., optim.Optimizer], match: str
) -> None:
    model = model_of()
    with pytest.raises(
        CaptureError, match=f"{match}(.|\n)*lookups.py:(.|\n)*leave out sparse=True"
    ):
        capture(model, loss, batch(0), make(model.parameters()))

    twin, dense = model_of(), model_of(sparse=False)
    loss(twin, batch(0)).backward()
    with pytest.raises(RuntimeError, match="spars"):
        make(twin.parameters()).step()
    assert capture(dense, loss, batch(0), make(dense.parameters())).nodes


def test_a_sum_of_a_sparse_and_a_dense_gradient_is_dense() -> None:
    model = model_of()
    model.tied = True

    assert capture(model, loss, batch(0), optim.AdamW(model.parameters())).nodes
    with pytest.raises(CaptureError, match="SparseAdam takes sparse gradients, and that of 'table"):
        capture(model, loss, batch(0), CombinedOptimizer(sparse_adam(model)))


def test_frequencies_and_sparse_gradients_exclude_each_other() -> None:
    model = model_of()
    model.table.scale_grad_by_freq = True

    with pytest.raises(CaptureError, match=r"scale_grad_by_freq=True(.|\n)*lookups.py:"):
        capture(model, loss, batch(0), optim.SGD(model.parameters()))


def test_a_forward_alone_takes_any_embedding() -> None:
    assert capture(model_of(), loss, batch(0)).nodes


def _without_gradient(model: Net, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss next to lookups that it does not depend on."""
    with torch.no_grad():
        seen = model.table(torch.arange(ROWS)).norm()
    unused = model.table(batch + 3).sum(1)
    return loss(model, batch) + unused.detach().sum(), {"norm": seen}


def test_lookups_without_a_gradient_are_no_lookups_of_sparse_adam() -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    optimizer, theirs = CombinedOptimizer(sparse_adam(model)), sparse_adam(twin)
    graph = capture(model, _without_gradient, batch(0), optimizer)
    states = graph_states(graph, initial_states(model, optimizer))

    for index in range(STEPS):
        rows = torch.full((4, 2), index)  # so that later steps leave the rows of earlier ones alone
        rates = dict.fromkeys(("lr", "lr.0", "lr.1"), 0.1)
        _, states = run_graph(graph, states, [{"batch": rows}], rates)
        for one in theirs:
            one.zero_grad()
        _without_gradient(twin, rows)[0].backward()
        for one in theirs:
            one.step()

        for key, value in twin.state_dict().items():
            torch.testing.assert_close(states[key], value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", [optim.Adagrad, RowWiseAdagrad])
def test_a_sparse_gradient_without_an_epsilon_is_refused(kind: type[optim.Optimizer]) -> None:
    model = model_of()
    optimizer = kind(model.parameters(), eps=0.0)  # type: ignore[call-arg] # as both take it

    with pytest.raises(CaptureError, match="eps=0 cannot be followed"):
        capture(model, loss, batch(0), optimizer)
