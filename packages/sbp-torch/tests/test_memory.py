"""Lifetimes, peaks by kind and module, and the meter."""

from __future__ import annotations

import gc

import pytest
import torch

from sbp_aten.passes import prepare_step
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.actors import Compute, Instruction, dying_keys
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import PlanError
from sbp_core.graph import LogicalGraph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Rate, Ref
from sbp_core.infer import infer_strategy
from sbp_core.memory import (
    MemoryKind,
    check_memory,
    memory_profile,
    peak_text,
    predict_memory,
)
from sbp_core.memory.lifetime import lifetimes
from sbp_core.memory.memory_kinds import module_of_node, module_of_slot
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import Builder, chain, mlp
from sbp_core.testing.plans import data_parallel_plan, diamond, pipeline_plan, strategy_of
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.memory.layout import Layouts
from sbp_torch.memory.meter import MemoryMeter
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.testing.cases import compile_case
from sbp_torch.testing.models import Program
from sbp_torch.testing.programs import small_cluster

_ONE = Placement([0], ["rank"])
_REPLICATED = {
    "batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
    "gradients": "B",
    "updates": "B",
}
_WAYS = {
    "one": ((1,), {}, 1),
    "data": ((2,), _REPLICATED, 1),
    "zero": ((2,), dict.fromkeys(_REPLICATED, "S(0)"), 1),
    "accumulation": ((2,), _REPLICATED, 2),
}


def _gpt_plan(graph: LogicalGraph, way: str) -> PhysicalPlan:
    shape, pins, num_micro_batches = _WAYS[way]
    mesh = Placement.grid(shape, ("data",))
    prepared = prepare_step(graph, num_micro_batches)
    request = PlanRequest(graph=prepared, mesh=mesh, cluster=small_cluster(mesh.size))
    return compile_plan(prepared, infer_strategy(request, planner="test", pins=pins))


def _measured(plan: PhysicalPlan, gpt: Program, way: str) -> dict[int, tuple[int, int]]:
    """Return by rank the bytes at the peak of the second step, and after it."""
    from sbp_torch.graph_capture import initial_states

    model, optimizer = gpt.build(torch.float64)
    states, meter = initial_states(model, optimizer), MemoryMeter(plan)
    count = _WAYS[way][2]
    batches = gpt.batches(2 * count)
    runtime = ReferenceRuntime(ReferenceConfig())
    with runtime.start(plan, states, LocalBackend()) as session, meter.watching(session):
        for index in range(2):
            parts = batches[index * count : (index + 1) * count]
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            meter.restart()
            session.step(whole, {"lr": 1e-2, "seed": 0, "step": index})
        return {part.rank: (meter.peak(part.rank), meter.alive(part.rank)) for part in plan.ranks}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("way", _WAYS)
def test_the_peak_of_a_gpt_is_as_predicted(gpt: Program, gpt_graph: LogicalGraph, way: str) -> None:
    plan = _gpt_plan(gpt_graph, way)
    found = predict_memory(plan)

    measured = _measured(plan, gpt, way)

    for rank, memory in found.ranks.items():
        peak, resting = measured[rank]
        # The reference runtime keeps the loss of one rank only.
        assert 0 <= memory.peak - peak <= 8
        assert resting == memory.resting


def test_a_plan_that_does_not_fit_is_refused() -> None:
    found = predict_memory(data_parallel_plan())

    check_memory(found, found.peak)
    with pytest.raises(PlanError, match=r"rank 0 would need .* of it for states"):
        check_memory(found, found.peak - 1)


def test_more_micro_batches_in_flight_need_more_memory() -> None:
    gpipe, alternating = (
        predict_memory(pipeline_plan(4, quotas)).ranks[0] for quotas in ((4, 4), (2, 1))
    )

    assert gpipe.peak > alternating.peak
    assert gpipe.resting == alternating.resting


def test_memory_is_that_of_states_of_the_batch_and_of_what_lives_at_once() -> None:
    memory = predict_memory(compile_plan(chain(), strategy_of(chain(), (_ONE,)))).ranks[0]

    assert memory.resting == 4 * 4 * 4
    # The batch, mm and relu are 8 x 4 each; mm is dead when the sum is made.
    assert memory.peak == memory.resting + 3 * 8 * 4 * 4


def test_what_a_collective_takes_lives_beside_what_it_makes() -> None:
    graph, matrix = diamond(), 4 * 4 * 4
    plan = compile_plan(graph, strategy_of(graph, signatures={"y": "S(1) | S(0) -> P"}))

    buffers = {b.name: b for b in lifetimes(plan, Layouts())[0].buffers}
    partial, reduced = buffers["y"], buffers["y@0(B)"]

    assert partial.size_bytes == reduced.size_bytes == matrix
    assert partial.end == reduced.start


def test_what_is_on_its_way_counts_for_the_sender() -> None:
    # With four micro-batches in flight, stage 0 runs all of them before stage 1 takes the first.
    plan = pipeline_plan(4, (4, 4))
    channels = [channel for channel in plan.links if channel.sender[0] == 0]

    buffers = lifetimes(plan, Layouts())[0].buffers
    sent = [b for b in buffers if b.name == "layers.0.relu"]

    assert [channel.quota for channel in channels] == [4]
    assert len(sent) == 4
    assert max(b.start for b in sent) < min(b.end for b in sent)


def test_a_sender_may_be_ahead_of_its_receivers_by_all_that_is_in_flight() -> None:
    # A session held more than predicted where a receiver took what was sent later than predicted.
    graph = accumulate(chain(), 3)
    stages = (Placement([0], ["rank"]), Placement([1], ["rank"]))
    later = {"act.relu": 1, "sum": 1, "sum.mean": 1}
    strategy = strategy_of(graph, stages, node_stages=later, in_flight=(3, 3))
    plan = compile_plan(graph, strategy)

    buffers = lifetimes(plan, Layouts())[0].buffers

    sent = [b for b in buffers if b.name == "lin.mm"]
    assert len(sent) == 3
    assert max(b.start for b in sent) <= min(b.end for b in sent)


def test_a_piece_of_its_own_shard_keeps_the_storage_of_all_of_it() -> None:
    # Rank 0 holds both rows of what it makes, and rank 1 no column; afterwards each has a row.
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2, 1))
    b.add_input("w", InputKind.PARAMETER, (2, 1))
    b.op("loss", "sum.default", (Ref("x"),), ())
    b.op("n", "sub.Tensor", (Ref("w"), Ref("w")), (2, 1), phase=Phase.OPTIMIZER, pointwise=True)
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="n"))
    graph = b.graph()
    signatures = {"n": "S(1) | S(1) -> S(1)"}
    strategy = strategy_of(graph, signatures=signatures, storage={"w": "S(0)"})
    plan = compile_plan(graph, strategy, CompileOptions(in_place_states=False))
    meter = MemoryMeter(plan)

    states = {"w": torch.ones(2, 1)}
    runtime = ReferenceRuntime(ReferenceConfig())
    with runtime.start(plan, states, LocalBackend()) as session, meter.watching(session):
        session.step({"x": torch.ones(2, 1)}, {})
        held = {rank: meter.alive(rank) for rank in (0, 1)}

    assert {rank: memory.resting for rank, memory in predict_memory(plan).ranks.items()} == held
    assert held == {0: 8, 1: 4}


def test_what_the_backward_phase_needs_outlives_the_forward_phase() -> None:
    graph = diamond()
    plan = compile_plan(graph, strategy_of(graph, (_ONE,)))

    found = lifetimes(plan, Layouts())[0]

    ends = {b.name: found.ticks[b.end][0] for b in found.buffers}
    assert (ends["y"], ends["a"], ends["b"]) == ("backward.0.0", "forward.0.0", "forward.0.0")


def test_what_a_view_looks_at_lives_as_long_as_the_view() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.op("y", "mm.default", (Ref("x"), Ref("x")), (4, 4))
    b.op("t", "t.default", (Ref("y"),), (4, 4))
    b.op("z", "relu.default", (Ref("t"),), (4, 4), pointwise=True)
    b.op("loss", "sum.default", (Ref("z"),), ())
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    graph = b.graph()
    plan = compile_plan(graph, strategy_of(graph, (_ONE,)))

    found = lifetimes(plan, Layouts())[0]

    buffers = {b.name: b for b in found.buffers}
    assert "t" not in buffers
    assert found.ticks[buffers["y"].end][2] == "z"


def test_new_states_count_as_the_shard_that_they_are_of() -> None:
    graph = diamond()
    signatures = {"new": "S(0) | S(0) -> S(0)"}
    strategy = strategy_of(graph, signatures=signatures, storage={"w": "S(0)"})
    plan = compile_plan(graph, strategy, CompileOptions(in_place_states=False))

    found = lifetimes(plan, Layouts())[0].buffers

    sizes = [b.size_bytes for b in found if b.kind is MemoryKind.PARAMETERS]
    assert sizes == [2 * 4 * 4] * 2


@pytest.mark.parametrize("sharding", ["B", "S(0)"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_the_compiled_plan_needs_no_more_than_its_planner_predicted(
    sharding: str, num_micro_batches: int
) -> None:
    graph = mlp((4, 8, 4), num_micro_batches=num_micro_batches)
    mesh = Placement.grid((2,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(2))
    pins = {"batch": "S(0)", "parameters": sharding}
    strategy = infer_strategy(request, planner="test", pins=pins)

    found = predict_memory(compile_plan(graph, strategy))

    assert found.peak <= strategy.report["predicted_memory_bytes_per_rank"]


@pytest.mark.slow
def test_states_of_zero_are_divided_among_the_ranks(gpt_graph: LogicalGraph) -> None:
    whole = predict_memory(_gpt_plan(gpt_graph, "one")).ranks[0]
    parts = predict_memory(_gpt_plan(gpt_graph, "zero")).ranks

    assert sum(rank.resting for rank in parts.values()) == whole.resting
    assert all(rank.resting < 0.6 * whole.resting for rank in parts.values())


@pytest.mark.slow
def test_kinds_and_modules_add_up_to_the_peak(gpt_graph: LogicalGraph) -> None:
    for memory in predict_memory(_gpt_plan(gpt_graph, "data")).ranks.values():
        assert sum(memory.kinds.values()) == memory.peak == sum(memory.modules.values())
        assert memory.kinds[MemoryKind.PARAMETERS] > 0
        assert memory.kinds[MemoryKind.STATES] > 0


@pytest.mark.slow
def test_gradients_and_gathered_parameters_are_told_from_activations() -> None:
    plan = compile_case("sharded states")
    kinds = {b.kind for b in lifetimes(plan, Layouts())[0].buffers}

    assert {
        MemoryKind.GRADIENTS,
        MemoryKind.GATHERED,
        MemoryKind.ACTIVATIONS,
        MemoryKind.TEMPORARIES,
    } <= kinds


def test_old_states_live_beside_new_ones_that_are_not_written_over_them() -> None:
    plan = compile_case("one rank", in_place_states=False)
    found = lifetimes(plan, Layouts())[0]
    last = len(found.ticks) - 1

    old = [b for b in found.buffers if b.kind is MemoryKind.PARAMETERS and not b.start]
    new = [b for b in found.buffers if b.kind is MemoryKind.PARAMETERS and b.start]
    assert len(old) == len(new) > 0
    assert all(buffer.end == last for buffer in (*old, *new))


def test_a_segment_that_makes_nothing_still_lets_the_next_gather_begin() -> None:
    # first -> unused, last: nobody uses what `unused` makes, but the gather for `last` waits for it
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    for name, value in (("first", "x"), ("unused", "first"), ("last", "first")):
        b.add_input(f"{name}.w", InputKind.PARAMETER, (4, 4))
        b.op(name, "mm.default", (Ref(value), Ref(f"{name}.w")), (4, 4))
    b.op("loss", "sum.default", (Ref("last"),), ())
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    graph = b.graph("dead end")
    storage = dict.fromkeys(("first.w", "unused.w", "last.w"), "S(0)")
    options = CompileOptions(boxing_thread=True, prefetch=0)
    plan = compile_plan(graph, strategy_of(graph, storage=storage), options)
    silent = {a.name for a in plan.ranks[0].actors if not (a.outputs or a.emits or a.writes)}
    tokens = [r for r in plan.ranks[0].registers if not r.keys and r.producer in silent]
    assert [register.consumers for register in tokens] == [("last.w@0(B)!forward",)]

    found = lifetimes(plan, Layouts())[0]

    nodes = [node for _, _, node in found.ticks]
    assert nodes.index("unused") < nodes.index("last.w@0(B)!forward") < nodes.index("last")
    alive = {buffer.name: buffer for buffer in found.buffers}
    assert alive["unused"].start == alive["unused"].end == nodes.index("unused")


@pytest.mark.slow
def test_the_table_names_every_rank_its_peak_and_the_largest_modules() -> None:
    found = predict_memory(compile_case("tensor parallel"))

    lines = found.lines()

    assert lines[1].split()[:3] == ["rank", "peak", "parameters"]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert "most on rank" in lines[-1] and "down" in lines[-1]
    assert found.to_json()["0"]["peak_bytes"] == found.ranks[0].peak <= found.peak


@pytest.mark.parametrize(
    ("name", "module"),
    [("h.0.mm", "h.0"), ("h.0.grad.mm_1", "h.0"), ("h.0.w.update.mul", "h.0"), ("mm", "")],
)
def test_a_node_belongs_to_the_module_in_its_name(name: str, module: str) -> None:
    assert module_of_node(name) == module


def test_a_state_belongs_to_the_module_of_its_parameter() -> None:
    assert module_of_slot("h.0.weight", "parameter") == "h.0"
    assert module_of_slot("h.0.weight.exp_avg", "optimizer_state") == "h.0"


@pytest.mark.slow
def test_the_meter_counts_views_once_and_forgets_what_is_gone() -> None:
    plan = compile_case("one rank")
    meter = MemoryMeter(plan)
    base = meter.alive(0)

    tensor = torch.ones(10)
    view = tensor.view(2, 5)
    meter.note(0, tensor)
    meter.note(0, view)
    both = meter.alive(0) - base
    del tensor
    gc.collect()
    one = meter.alive(0) - base
    del view
    gc.collect()

    assert (both, one, meter.alive(0) - base) == (40, 40, 0)


def test_the_meter_counts_what_another_rank_made_by_what_is_seen_of_it() -> None:
    plan = compile_case("data parallel")
    meter = MemoryMeter(plan)
    whole = torch.ones(10)
    part = whole[:3]

    meter.note(0, whole)
    meter.note(1, part)

    assert (meter.alive(0), meter.alive(1)) == (40, 12)


def test_values_die_after_their_last_use_unless_they_leave() -> None:
    actor = Compute(
        name="forward.0.0",
        stage=0,
        phase=Phase.FORWARD,
        rate=Rate.MICRO,
        thread="compute",
        instructions=(
            Instruction(op="aten.neg.default", args=(Ref("x"),), outputs=("a",)),
            Instruction(op="aten.add.Tensor", args=(Ref("a"), Ref("x")), outputs=("b",)),
            Instruction(op="aten.max.dim", args=(Ref("b"), 0), outputs=("c", "unused")),
        ),
        inputs=("x",),
        outputs=("b", "c"),
    )

    assert dying_keys(actor) == ((), ("x", "a"), ("unused",))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["zero", "accumulation"])
def test_the_profile_of_a_rank_has_the_peak_at_its_place_with_its_kinds(
    gpt_graph: LogicalGraph, way: str
) -> None:
    plan = _gpt_plan(gpt_graph, way)
    memory = predict_memory(plan).ranks[0]

    profile = memory_profile(lifetimes(plan, Layouts())[0])

    total = profile.total
    tick = total.index(max(total))
    assert (max(total), profile.ticks[tick]) == (
        memory.peak,
        (memory.actor, memory.firing, memory.node),
    )
    assert {kind: sizes[tick] for kind, sizes in profile.kinds.items() if sizes[tick]} == (
        memory.kinds
    )
    assert all(len(sizes) == len(profile.ticks) for sizes in profile.kinds.values())


def test_where_a_peak_is_and_what_is_alive_there_is_said() -> None:
    memory = predict_memory(data_parallel_plan()).ranks[0]

    text = peak_text(memory)

    assert text.startswith(f"rank 0 at its peak, in firing {memory.firing} of {memory.actor}")
    assert all(kind.value in text for kind, n in memory.kinds.items() if n > 0.01 * memory.peak)
