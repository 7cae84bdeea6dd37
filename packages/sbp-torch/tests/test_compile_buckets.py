from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch

from sbp_core.boxing import StepKind
from sbp_core.boxing.price import step_time_s
from sbp_core.compile import CompileOptions, Compute, compile_plan
from sbp_core.compile.actors import Collective
from sbp_core.compile.buckets import bucket
from sbp_core.compile.commit import COMMIT
from sbp_core.compile.items import ItemKind, LoweredItems
from sbp_core.compile.lowering import lower
from sbp_core.compile.physical import PLAN, PhysicalPlan
from sbp_core.errors import SbpValueError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref
from sbp_core.infer import infer_strategy
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.testing.graphs import Builder, cluster, mlp
from sbp_core.testing.plans import LINE, strategy_of
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession

_DATA = {
    "batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
    "gradients": "B",
    "updates": "B",
}
_SHARDED = ("optimizer_states", "gradients", "updates")
_ZERO_1 = {**_DATA, **dict.fromkeys(_SHARDED, "S(0)")}
_COLUMNS = {**_DATA, **dict.fromkeys(_SHARDED, "S(1)")}
_GRID = Placement.grid((2, 2), ("data", "tensor"))
_TENSOR = {name: {"data": sbp, "tensor": "B"} for name, sbp in _DATA.items()} | {
    "layers.0.weight*": {"data": "B", "tensor": "S(1)"}
}


def _strategy(graph: LogicalGraph, mesh: Placement, pins: Mapping[str, object]) -> Strategy:
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), pins={})
    return infer_strategy(request, planner="test", pins=pins)


def _plan(graph: LogicalGraph, strategy: Strategy, bucket_bytes: int | None) -> PhysicalPlan:
    plan = compile_plan(graph, strategy, CompileOptions(bucket_bytes=bucket_bytes))
    check(plan)
    return plan


def _kinds(plan: PhysicalPlan) -> Counter[StepKind]:
    actors = plan.ranks[0].actors
    boxed = [a for a in actors if isinstance(a, Collective) and a.name != COMMIT]
    return Counter(plan.steps[actor.step].kind for actor in boxed)


def _run(graph: LogicalGraph, plan: PhysicalPlan) -> tuple[list[torch.Tensor], ReferenceSession]:
    generator = torch.Generator().manual_seed(0)
    states = {
        entry.name: torch.rand(graph.tensor(entry.name).shape, generator=generator)
        for entry in graph.inputs
        if entry.kind.is_state
    }
    session = ReferenceSession(plan, states, ReferenceConfig())
    rows = graph.tensor("x").shape[0] * graph.num_micro_batches
    batches = [torch.rand(rows, graph.tensor("x").shape[1], generator=generator) for _ in range(2)]
    return [session.step({"x": batch}, {}).loss for batch in batches], session


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        (LINE, _DATA),
        (LINE, _ZERO_1),
        (LINE, _COLUMNS),
        (Placement.grid((4,), ("data",)), _ZERO_1),
        (Placement.grid((2, 2), ("replica", "data")), _DATA),
        (Placement.grid((2, 2), ("replica", "data")), _ZERO_1),
        (_GRID, _TENSOR),
    ],
    ids=["data", "ZeRO-1", "ZeRO-1 by columns", "on four", "2-D", "2-D ZeRO-1", "tensor"],
)
def test_buckets_change_no_bit_of_any_shard_and_no_byte_on_the_wire(
    mesh: Placement, pins: Mapping[str, object], num_micro_batches: int
) -> None:
    graph = mlp((4, 8, 8, 8, 4), num_micro_batches=num_micro_batches)
    strategy = _strategy(graph, mesh, pins)

    alone, packed = (_plan(graph, strategy, size) for size in (0, None))

    assert sum(_kinds(packed).values()) < sum(_kinds(alone).values())
    assert packed.boxing_bytes == alone.boxing_bytes
    assert PLAN.load(PLAN.dump(packed)).hash == packed.hash
    (losses, session), (others, other) = _run(graph, packed), _run(graph, alone)
    assert all(torch.equal(a, b) for a, b in zip(losses, others, strict=True))
    for part in packed.ranks:
        for slot in part.slots:
            if slot.kind != "batch":
                mine, wanted = (s.shard(slot.name, part.rank) for s in (session, other))
                assert torch.equal(mine, wanted), slot.name


def test_all_gradients_of_data_parallelism_travel_together() -> None:
    graph = mlp((4, 8, 8, 4))
    strategy = _strategy(graph, LINE, _DATA)

    # Three gradients and the loss.
    assert _kinds(_plan(graph, strategy, 0)) == {StepKind.ALL_REDUCE: 4}
    assert _kinds(_plan(graph, strategy, None)) == {StepKind.ALL_REDUCE: 2}


def test_zero_gathers_new_parameters_together_too() -> None:
    graph = mlp((4, 8, 8, 4))
    kinds = _kinds(_plan(graph, _strategy(graph, LINE, _ZERO_1), None))

    assert kinds[StepKind.REDUCE_SCATTER] == 1
    assert kinds[StepKind.ALL_GATHER] == 1


def test_a_bucket_is_closed_when_it_is_full_and_what_is_larger_travels_alone() -> None:
    # Gradients of 4 x 8, 8 x 16, 16 x 8 and 8 x 4 floats: 128, 512, 512, 128 bytes.
    graph = mlp((4, 8, 16, 8, 4))
    strategy = _strategy(graph, LINE, _DATA)

    def buffers(size: int) -> list[int]:
        plan = _plan(graph, strategy, size)
        steps = [plan.steps[a.step] for a in plan.ranks[0].actors if a.name.startswith("bucket")]
        return [4 * step.shape[-1] for step in steps]

    assert buffers(128 + 512) == [640, 640]
    assert buffers(256) == [256]
    assert buffers(255) == []


def test_gradients_are_packed_in_the_order_in_which_they_are_made() -> None:
    graph = mlp((4, 8, 8, 4))
    lowered = bucket(graph, lower(graph, _strategy(graph, LINE, _DATA)), None)

    (pack,) = [item for item in lowered.items if item.kind is ItemKind.PACK]
    assert [key.split(".grad")[0] for key in pack.inputs] == ["layers.2", "layers.1", "layers.0"]


def _lowered(bucket_bytes: int | None) -> LoweredItems:
    graph = mlp((4, 8, 8, 4))
    return bucket(graph, lower(graph, _strategy(graph, LINE, _DATA)), bucket_bytes)


def test_what_comes_out_of_a_reduced_buffer_are_views_of_it() -> None:
    graph = mlp((4, 8, 8, 4))
    plan = _plan(graph, _strategy(graph, LINE, _DATA), None)

    calls = [
        entry.op
        for actor in plan.ranks[0].actors
        for entry in (actor.instructions if isinstance(actor, Compute) else ())
        if entry.node == "bucket.0.unpacked"
    ]
    assert set(calls) == {"aten.view.default", "aten.split_with_sizes.default"}


def test_without_buckets_the_items_stay_as_they_are() -> None:
    assert [item.kind for item in _lowered(0).items].count(ItemKind.PACK) == 0
    assert [item.kind for item in _lowered(None).items].count(ItemKind.PACK) == 1


def test_a_slow_start_makes_buckets_larger() -> None:
    graph = mlp((64, 64, 64, 64), batch=512)
    strategy = _strategy(graph, LINE, _DATA)
    gradient = 4 * 64 * 64

    def num_reductions(latency_s: float) -> int:
        machine = cluster(latency_s=latency_s, bytes_per_s=1e9)
        plan = compile_plan(graph, strategy, CompileOptions(cluster=machine))
        step = next(s for s in plan.steps if s.kind is StepKind.ALL_REDUCE and s.shape)
        assert step_time_s(step, machine) > 0
        return _kinds(plan)[StepKind.ALL_REDUCE]

    assert num_reductions(gradient / 1e9 / 1e4) == 4
    assert num_reductions(gradient / 1e9) == 2


def test_a_bucket_of_negative_size_is_refused() -> None:
    with pytest.raises(SbpValueError, match="bucket_bytes=-1"):
        CompileOptions(bucket_bytes=-1)


def test_what_is_used_before_another_is_made_is_not_packed_with_it() -> None:
    b = Builder()
    for name in ("v", "w"):
        b.add_input(name, InputKind.PARAMETER, (4,))
    b.add_input("x", InputKind.BATCH, (4, 4))
    at = {"phase": Phase.BACKWARD}
    late = {"phase": Phase.OPTIMIZER, "pointwise": True}
    b.op("g", "sum.dim_IntList", (Ref("x"), (0,)), (4,), **at)
    b.op("new", "sub.Tensor", (Ref("v"), Ref("g")), (4,), **late)
    b.op("y", "mul.Tensor", (Ref("x"), Ref("new")), (4, 4), pointwise=True, **at)
    b.op("h", "sum.dim_IntList", (Ref("y"), (0,)), (4,), **at)
    b.op("newer", "sub.Tensor", (Ref("w"), Ref("h")), (4,), **late)
    for name, value in (("v", "new"), ("w", "newer")):
        b.outputs.append(GraphOutput(name=name, kind=OutputKind.STATE, value=value))
    graph = verify_graph(accumulate(b.graph(), 1))
    signatures = dict.fromkeys(("g", "h"), "S(0) -> P") | {"y": "S(0) | B -> S(0)"}
    plan = _plan(graph, strategy_of(graph, signatures=signatures, storage={"x": "S(0)"}), None)
    state = {"v": torch.ones(4), "w": torch.ones(4)}
    batch = torch.arange(16.0).view(4, 4)

    session = ReferenceSession(plan, state, ReferenceConfig())
    session.step({"x": batch}, {})
    new = 1 - batch.sum(0)
    assert _kinds(plan) == {StepKind.ALL_REDUCE: 2}
    assert torch.equal(session.state_dict()["v"], new)
    assert torch.equal(session.state_dict()["w"], 1 - (batch * new).sum(0))
