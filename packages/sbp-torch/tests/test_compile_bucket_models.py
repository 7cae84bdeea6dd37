"""What travels together in a GPT: gradients, parameters of one block, arguments of one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch

from sbp_aten.pass_options import MixedPrecision, PassOptions
from sbp_aten.passes import prepare_step
from sbp_core.boxing import StepKind
from sbp_core.compile import COMMIT, CompileOptions, Compute, compile_plan
from sbp_core.compile.actors import Collective
from sbp_core.compile.buckets import bucket
from sbp_core.compile.items import Item, ItemKind
from sbp_core.compile.lowering import lower
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref, block_of
from sbp_core.infer import infer_strategy
from sbp_core.memory.lifetime import lifetimes
from sbp_core.memory.memory_kinds import MemoryKind, kinds_of_keys
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.testing.graphs import Builder, cluster
from sbp_core.testing.plans import LINE, strategy_of
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.memory.layout import Layouts
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.testing.models import PROGRAMS, Gpt, Program, same_states

_SPLIT = ("batch", "activations", "parameters", "optimizer_states", "gradients", "updates")
_ZERO_3 = dict.fromkeys(_SPLIT, "S(0)")
_DATA = {**dict.fromkeys(_SPLIT, "B"), "batch": "S(0)", "activations": "S(0)"}
_GPT = PROGRAMS["gpt"]
_LARGE = 1 << 20
#: Of a micro-batch: so many that parameters are moved to activations, and not the other way.
_SIZE = 64


def _graph(
    options: PassOptions | None = None, micro_batches: int = 1, program: Program = _GPT
) -> LogicalGraph:
    model, optimizer = program.build()
    (batch,) = program.batches(1, _SIZE)
    graph = capture(model, program.loss, batch, optimizer)
    return prepare_step(graph, micro_batches, options=options)


def _strategy(
    graph: LogicalGraph, mesh: Placement = LINE, pins: Mapping[str, str] = _ZERO_3
) -> Strategy:
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), pins={})
    return infer_strategy(request, planner="test", pins=pins)


def _packs(graph: LogicalGraph, strategy: Strategy, bucket_bytes: int = _LARGE) -> list[Item]:
    """Return what packs parameters for their use, in order."""
    items = bucket(graph, lower(graph, strategy), bucket_bytes).items
    return [item for item in items if item.is_apart]


def _check_order(graph: LogicalGraph, items: Iterable[Item]) -> None:
    made = {entry.name for entry in graph.inputs}
    for item in items:
        assert made.issuperset(item.inputs), f"{item.name} comes before what it takes"
        made.update(item.outputs)


def _gathers(plan: PhysicalPlan, phase: Phase) -> int:
    return sum(
        isinstance(actor, Collective)
        and actor.phase is phase
        and plan.steps[actor.step].kind is StepKind.ALL_GATHER
        for actor in plan.ranks[0].actors
    )


def _train(
    graph: LogicalGraph, plan: PhysicalPlan, program: Program = _GPT
) -> tuple[list[torch.Tensor], dict[str, object]]:
    session = ReferenceSession(plan, initial_states(*program.build()), ReferenceConfig())
    size = _SIZE * graph.num_micro_batches
    losses = [session.step(batch, {"lr": 0.01}).loss for batch in _GPT.batches(3, size)]
    return losses, session.state_dict()


@pytest.mark.slow
def test_the_gradients_of_weights_and_biases_travel_together() -> None:
    graph = _graph()

    plan = compile_plan(graph, _strategy(graph, pins=_DATA), CompileOptions(bucket_bytes=_LARGE))

    check(plan)
    sent = [
        plan.steps[a.step]
        for a in plan.ranks[0].actors
        if isinstance(a, Collective) and a.name != COMMIT
    ]
    # Sum and count of the loss, and the gradients of all parameters: also of what the batch has in
    # common, and of a bias, which is summed to (1, n), of which the optimizer takes a view.
    assert [step.kind for step in sent] == [StepKind.ALL_REDUCE] * 2
    model, _ = _GPT.build()
    every = sum(p.numel() for p in model.parameters())
    assert sorted(step.shape for step in sent) == [(2,), (every,)]


@pytest.mark.slow
def test_the_parameters_of_a_block_are_gathered_in_one_call_a_phase() -> None:
    graph = _graph()
    strategy = _strategy(graph)

    packs = _packs(graph, strategy)

    forward = [item.inputs for item in packs if item.phase is Phase.FORWARD]
    blocks = [{block_of(name) for name in names} for names in forward]
    assert blocks == [{"blocks.0"}, {"blocks.1"}, {"norm"}]
    assert [len(names) for names in forward] == [12, 12, 2]
    backward = [block_of(item.inputs[0]) for item in packs if item.phase is Phase.BACKWARD]
    assert [block for block in backward if block != "norm"] == ["blocks.1", "blocks.0"]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("regather", [("*",), ()], ids=["regathered", "kept"])
@pytest.mark.parametrize("boxing_thread", [False, True], ids=["one thread", "own thread"])
def test_gathering_together_changes_no_bit_and_no_byte_on_the_wire(
    micro_batches: int, regather: tuple[str, ...], boxing_thread: bool
) -> None:
    graph = _graph(micro_batches=micro_batches)
    strategy = replace(_strategy(graph), regather=regather)

    alone, together = (
        compile_plan(
            graph, strategy, CompileOptions(bucket_bytes=size, boxing_thread=boxing_thread)
        )
        for size in (0, _LARGE)
    )

    check(together)
    # Three calls for the 26 parameters of two blocks and the last norm.
    assert _gathers(alone, Phase.FORWARD) - _gathers(together, Phase.FORWARD) == 26 - 3
    assert together.boxing_bytes == alone.boxing_bytes
    losses, states = _train(graph, together)
    wanted, others = _train(graph, alone)
    assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True))
    assert same_states(states, others)


@pytest.mark.slow
def test_on_a_grid_each_row_gathers_what_its_other_axis_splits() -> None:
    graph = _graph()
    mesh = Placement.grid((2, 2), ("data", "replica"))
    strategy = _strategy(graph, mesh)

    together = compile_plan(graph, strategy, CompileOptions(bucket_bytes=_LARGE))

    check(together)
    alone = compile_plan(graph, strategy, CompileOptions(bucket_bytes=0))
    assert together.boxing_bytes == alone.boxing_bytes
    assert same_states(_train(graph, together)[1], _train(graph, alone)[1])


@pytest.mark.slow
def test_fewer_gathers_make_larger_segments() -> None:
    graph = _graph()
    strategy = _strategy(graph)

    def num_segments(bucket_bytes: int) -> int:
        plan = compile_plan(graph, strategy, CompileOptions(bucket_bytes=bucket_bytes))
        return sum(actor.name.startswith("forward.") for actor in plan.ranks[0].actors)

    # Gathers of positions, two blocks, norm and head stand between them, and the sum of the loss.
    assert num_segments(_LARGE) == 6 + 1
    assert num_segments(0) == 16 + 1


@pytest.mark.slow
def test_no_more_than_a_block_is_gathered_ahead_of_its_use() -> None:
    graph = _graph()
    strategy = _strategy(graph)
    options = CompileOptions(bucket_bytes=_LARGE, boxing_thread=True, prefetch=1)
    rank = compile_plan(graph, strategy, options).ranks[0]

    waits = {r.consumers[0]: r.producer for r in rank.registers if not r.keys}
    second = next(a for a in rank.actors if "blocks.1.norm1.weight" in a.reads)
    assert second.thread == "boxing" and second.name.endswith(".packed")
    assert waits[second.name].startswith("forward.")


@pytest.mark.slow
def test_what_comes_next_is_packed_and_gathered_before_a_block_is_computed() -> None:
    graph = _graph()
    options = CompileOptions(bucket_bytes=_LARGE, overlap=True, prefetch=1)
    rank = compile_plan(graph, _strategy(graph), options).ranks[0]
    order = [name for name, _ in rank.orders["compute"]]

    def packs(parameter: str) -> str:
        return next(a.name for a in rank.actors if parameter in a.reads)

    def takes(maker: str) -> str:
        (name,) = {name for r in rank.outputs_of[maker] if r.keys for name in r.consumers}
        return name

    pairs = (
        ("blocks.0.norm1.weight", "blocks.1.norm1.weight"),
        ("blocks.1.norm1.weight", "norm.weight"),
    )
    for now, following in pairs:
        computes, pack = takes(takes(packs(now))), packs(following)
        assert order.index(pack) < order.index(takes(pack)) < order.index(computes)


@pytest.mark.slow
def test_no_gather_of_the_backward_phase_begins_in_the_forward_phase() -> None:
    graph = _graph()
    options = CompileOptions(bucket_bytes=_LARGE, overlap=True, prefetch=1)
    rank = compile_plan(graph, _strategy(graph), options).ranks[0]

    order = [name for name, _ in rank.orders["compute"]]
    last = max(order.index(name) for name in order if name.startswith("forward."))
    gathers = [
        a.name
        for a in rank.actors
        if isinstance(a, Collective) and a.phase is Phase.BACKWARD and "bucket" not in a.name
    ]
    assert gathers and all(order.index(name) > last for name in gathers)


@pytest.mark.slow
def test_shards_that_are_cast_before_they_are_gathered_travel_together_too() -> None:
    wide = replace(_GPT, model=lambda: Gpt(width=64))
    graph = _graph(PassOptions(mixed_precision=MixedPrecision(dtype="bfloat16")), program=wide)
    strategy = _strategy(graph)

    lowered = bucket(graph, lower(graph, strategy), _LARGE)

    packed = [
        [graph.tensor(lowered.held[key].value).dtype for key in item.inputs]
        for item in lowered.items
        if item.is_apart
    ]
    first = next(dtypes for dtypes in packed if len(dtypes) > 1 and dtypes[0] != "float32")
    assert set(first) == {"bfloat16"}
    _check_order(graph, lowered.items)
    alone, together = (
        compile_plan(graph, strategy, CompileOptions(bucket_bytes=size)) for size in (0, _LARGE)
    )
    check(together)
    assert same_states(_train(graph, together, wide)[1], _train(graph, alone, wide)[1])


def test_a_cast_that_was_gathered_alone_before_stays_where_it_is() -> None:
    b = Builder()
    for name in ("blocks.0.v", "blocks.0.w"):
        b.add_input(name, InputKind.PARAMETER, (4,))
    b.add_input("x", InputKind.BATCH, (4,))
    for name in ("v", "w"):
        b.op(f"blocks.0.{name}_cast", "_to_copy.default", (Ref(f"blocks.0.{name}"),), (4,))
    b.op("y", "mul.Tensor", (Ref("x"), Ref("blocks.0.v_cast")), (4,), pointwise=True)
    at = {"phase": Phase.BACKWARD, "pointwise": True}
    b.op("g", "mul.Tensor", (Ref("y"), Ref("blocks.0.w_cast")), (4,), **at)
    b.op("h", "mul.Tensor", (Ref("g"), Ref("blocks.0.v_cast")), (4,), **at)
    b.op("new", "sub.Tensor", (Ref("blocks.0.v"), Ref("h")), (4,), phase=Phase.OPTIMIZER,
         pointwise=True)  # fmt: skip
    b.outputs.append(GraphOutput(name="blocks.0.v", kind=OutputKind.STATE, value="new"))
    graph = verify_graph(accumulate(b.graph(), 1))
    signatures = dict.fromkeys(("blocks.0.v_cast", "blocks.0.w_cast"), "S(0) -> S(0)")
    storage = dict.fromkeys(("blocks.0.v", "blocks.0.w"), "S(0)")
    strategy = strategy_of(graph, signatures=signatures, storage=storage)

    items = bucket(graph, lower(graph, strategy), _LARGE).items

    assert [item.inputs for item in items if item.is_apart] == [
        ("blocks.0.w_cast", "blocks.0.v_cast")
    ]
    _check_order(graph, items)


@pytest.mark.slow
def test_what_is_taken_out_of_a_gathered_buffer_counts_as_gathered() -> None:
    graph = _graph()
    plan = compile_plan(graph, _strategy(graph), CompileOptions(bucket_bytes=_LARGE))
    kinds = kinds_of_keys(plan, plan.ranks[0])

    taken = [
        key
        for actor in plan.ranks[0].actors
        for entry in (actor.instructions if isinstance(actor, Compute) else ())
        if entry.node.endswith(".unpacked") and actor.phase is not Phase.OPTIMIZER
        for key in entry.outputs
        if "@" in key and graph.input_kinds.get(key.split("@")[0])
    ]
    assert taken and all(kinds[key] is MemoryKind.GATHERED for key in taken)


@pytest.mark.slow
def test_a_rank_never_holds_the_gathered_parameters_of_two_blocks() -> None:
    graph = _graph()
    model, _ = _GPT.build()
    strategy = _strategy(graph)
    block = sum(4 * p.numel() for p in model.blocks[0].parameters())
    rest = sum(4 * p.numel() for p in (*model.norm.parameters(), *model.head.parameters()))

    plan = compile_plan(graph, strategy, CompileOptions(bucket_bytes=_LARGE))

    found = lifetimes(plan, Layouts())[0]
    buffers = [buffer for buffer in found.buffers if buffer.kind is MemoryKind.GATHERED]
    alive = [
        sum(buffer.size_bytes for buffer in buffers if buffer.start <= at <= buffer.end)
        for at in range(len(found.ticks))
    ]
    # The buffer, and what is taken out of it.
    assert 0 < max(alive) <= 2 * block + rest


def test_reductions_of_arguments_of_one_node_share_a_buffer() -> None:
    b = Builder()
    b.add_input("v", InputKind.PARAMETER, (4,))
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.op("s", "sum.dim_IntList", (Ref("x"), (0,)), (4,))
    b.op("q", "mul.Tensor", (Ref("x"), Ref("x")), (4, 4), pointwise=True)
    b.op("t", "sum.dim_IntList", (Ref("q"), (0,)), (4,))
    b.op("ratio", "div.Tensor", (Ref("s"), Ref("t")), (4,), pointwise=True)
    b.op("new", "sub.Tensor", (Ref("v"), Ref("ratio")), (4,), pointwise=True, phase=Phase.OPTIMIZER)
    b.outputs.append(GraphOutput(name="v", kind=OutputKind.STATE, value="new"))
    graph = verify_graph(accumulate(b.graph(), 1))
    signatures = dict.fromkeys(("s", "t"), "S(0) -> P") | {"q": "S(0) | S(0) -> S(0)"}
    strategy = strategy_of(graph, signatures=signatures, storage={"x": "S(0)"})

    plan = compile_plan(graph, strategy, CompileOptions(bucket_bytes=_LARGE))

    check(plan)
    commit = 1
    assert Counter(step.kind for step in plan.steps) == {StepKind.ALL_REDUCE: 1 + commit}
    session = ReferenceSession(plan, {"v": torch.ones(4)}, ReferenceConfig())
    batch = torch.arange(1.0, 17.0).view(4, 4)
    session.step({"x": batch}, {})
    wanted = 1 - batch.sum(0) / (batch * batch).sum(0)
    assert torch.allclose(session.state_dict()["v"], wanted, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_pack_for_a_segment_stays_in_it() -> None:
    graph = _graph()
    items = bucket(graph, lower(graph, _strategy(graph)), _LARGE).items

    gradients = [i for i in items if i.kind is ItemKind.PACK and not i.is_apart]
    assert gradients and all(item.is_inside for item in gradients)
