"""Updates by row in plans: memory as predicted, prices of the rows that are touched, stacks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.pass_options import PassOptions, RowUpdates
from sbp_aten.passes import prepare_step
from sbp_core.compile import PhysicalPlan, compile_plan
from sbp_core.cost import op_time_s
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.memory import predict_memory
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.sbp import B, NdSbp
from sbp_core.signatures import OpCall
from sbp_core.strategy import Signature
from sbp_core.testing.graphs import cluster
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.memory.meter import MemoryMeter
from sbp_torch.runtime.accumulation import accumulate
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime

WIDTH, BATCH, PLACES = 4, 6, 2

MICRO_BATCHES = 3


class Table(nn.Module):
    """A table and a layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.table(x).sum(1))
        return made


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    made: Tensor = model(batch).square().mean()
    return made


def program(rows: int) -> tuple[Table, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Table(rows)
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


@cache
def graph_of(rows: int, micro: int = MICRO_BATCHES) -> LogicalGraph:
    model, optimizer = program(rows)
    graph = capture(model, loss, torch.zeros(BATCH, PLACES, dtype=torch.int64), optimizer)
    options = PassOptions(update_rows=RowUpdates(when="always"))
    return prepare_step(graph, micro, options=options)


def plan_of(rows: int, table: str) -> PhysicalPlan:
    mesh = Placement.grid((2,), axes=("data",))
    request = PlanRequest(graph=graph_of(rows), mesh=mesh, cluster=cluster())
    pins = {"table.weight": table, "use:table.weight": table, "table.weight.sum": table}
    plan = compile_plan(graph_of(rows), infer_strategy(request, planner="test", pins=pins))
    check(plan)
    return plan


def peaks(plan: PhysicalPlan, rows: int) -> dict[int, int]:
    """Return by rank the bytes at the peak of the second step."""
    model, optimizer = program(rows)
    states, meter = initial_states(model, optimizer), MemoryMeter(plan)
    runtime = ReferenceRuntime(ReferenceConfig())
    draw = torch.Generator().manual_seed(1)
    with runtime.start(plan, states, LocalBackend()) as session, meter.watching(session):
        for _ in range(2):
            batch = torch.randint(0, rows, (MICRO_BATCHES * BATCH, PLACES), generator=draw)
            meter.restart()
            session.step({"batch": batch}, {"lr": 0.1})
        return {part.rank: meter.peak(part.rank) for part in plan.ranks}


@pytest.mark.parametrize("table", ["B", "S(0)", "S(1)"])
def test_memory_is_as_predicted(table: str) -> None:
    plan = plan_of(9, table)

    measured = peaks(plan, 9)

    for rank, memory in predict_memory(plan).ranks.items():
        # The reference runtime keeps the loss of one rank only.
        assert 0 <= memory.peak - measured[rank] <= 8


def test_a_larger_table_takes_no_more_than_its_own_bytes() -> None:
    small, large = (predict_memory(plan_of(rows, "B")).ranks[0].peak for rows in (1000, 5000))

    # The table and its sums of squares.
    assert large - small == 2 * 4000 * WIDTH * 4


def test_the_price_of_a_step_does_not_grow_with_the_table() -> None:
    def price_s(rows: int) -> float:
        graph, mesh, total = graph_of(rows, 1), Placement.grid((1,), axes=("data",)), 0.0
        for node in graph.nodes:
            if not node.is_host:
                call = OpCall.of(graph, node)
                whole = Signature(
                    tuple(NdSbp(B) for _ in call.inputs), tuple(NdSbp(B) for _ in call.outputs)
                )
                total += op_time_s(call, whole, mesh, cluster())
        return total

    assert price_s(1_000_000) == price_s(1000)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3)])
def test_a_stack_keeps_the_parts_of_all_micro_batches(shape: tuple[int, ...]) -> None:
    parts = [torch.randn(shape) for _ in range(MICRO_BATCHES)]
    total: Tensor | None = None

    for part in parts:
        given = part.clone()
        total = accumulate(total, given, "stack")
        given.zero_()  # the part's memory may be used again

    assert total is not None
    assert torch.equal(total, torch.stack(parts))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_may_be_short(dtype: torch.dtype) -> None:
    indices = torch.tensor([3, 1, 3], dtype=dtype)
    rows, sums = torch.ops.sbp.unique_rows(indices, [torch.ones(3, 2)])
    index, own = torch.ops.sbp.own_rows(rows, [sums], 0, 4)

    made = torch.ops.sbp.put_rows(torch.zeros(4, 2), index, own)

    assert made.tolist() == [[0, 0], [1, 1], [0, 0], [2, 2]]
