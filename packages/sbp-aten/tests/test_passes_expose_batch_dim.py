"""Products that keep the batch apart: the same step, and no activation moves for a split batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.pass_options import PassOptions
from sbp_aten.passes import expose_batch_dim, prepare_step
from sbp_core.compile import compile_plan
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import InputKind
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph

BATCH, TIME, WIDTH = 6, 3, 4

PINS = {
    "batch": "S(0)",
    "use:batch": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
    "gradients": "B",
    "updates": "B",
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)[0]
        return made


class TimeFirst(nn.Module):
    """Looks at sequences time by time; the last product has neither bias nor transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x.transpose(0, 1).contiguous()).tanh() @ self.second
        return made.transpose(0, 1)


class Heads(nn.Module):
    """Flattens times, batch and heads: the batch lies in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.transpose(0, 1).reshape(x.shape[1], BATCH, 2, 2)
        made: Tensor = self.layer(parts)
        return made.transpose(0, 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 5, batch_first=True),
    "recurrent": Recurrent,
    "time first": TimeFirst,
    "heads": Heads,
}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    made = model(batch["x"])
    return (made * made.detach().cos()).square().mean()


def _captured(
    name: str, time: int = TIME
) -> tuple[LogicalGraph, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    batch = {"x": torch.randn(BATCH, time, WIDTH, dtype=torch.float64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, _loss, batch, optimizer), initial_states(model, optimizer), batch


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", MODELS)
def test_products_with_the_batch_apart_compute_the_same_step(name: str) -> None:
    graph, states, batch = _captured(name)
    scalars = {"lr": 0.1, "seed": 1, "step": 2}

    apart = verify_graph(expose_batch_dim(graph))

    rows, made = (run_graph(entry, states, [batch], scalars) for entry in (graph, apart))
    torch.testing.assert_close(made[0]["loss"], rows[0]["loss"], rtol=1e-13, atol=1e-13)
    for key, value in rows[1].items():
        torch.testing.assert_close(made[1][key], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["time first", "heads"])
def test_a_split_batch_moves_no_activations(name: str) -> None:
    graph, _, _ = _captured(name, time=256)
    mesh = Placement.grid((2,), ("data",))

    moved = {}
    for apart in (False, True):
        step = prepare_step(graph, options=PassOptions(expose_batch_dim=apart))
        request = PlanRequest(graph=step, mesh=mesh, cluster=cluster())
        plan = compile_plan(step, infer_strategy(request, planner="test", pins=PINS))
        check(plan)
        moved[apart] = plan.boxing_bytes

    gradients = sum(
        graph.tensor(entry.name).size_bytes
        for entry in graph.inputs
        if entry.kind is InputKind.PARAMETER
    )
    loss = graph.tensor(graph.loss).size_bytes
    commit = 4  # bytes by which all ranks agree that a step may change states
    # An all-reduce on 2 ranks moves n bytes from each.
    assert moved[True] == 2 * (gradients + loss + commit)
    assert moved[True] < moved[False] / 4


def test_rows_whose_batch_comes_first_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    batch = {"x": torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64)}
    graph = capture(model, _loss, batch, torch.optim.SGD(model.parameters(), lr=0.1))

    assert expose_batch_dim(graph) is graph
