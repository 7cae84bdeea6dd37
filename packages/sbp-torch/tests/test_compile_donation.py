from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sbp_core.compile import Collective, CompileOptions, Compute, compile_plan
from sbp_core.compile.actors import Instruction
from sbp_core.compile.physical import PLAN, PhysicalPlan
from sbp_core.errors import RunError
from sbp_core.graph import LogicalGraph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref
from sbp_core.infer import infer_strategy
from sbp_core.memory import MemoryKind, lifetimes, predict_memory
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import Builder, cluster, mlp
from sbp_core.testing.plans import LINE, data_parallel_plan, strategy_of
from sbp_torch.memory.layout import Layouts
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.testing.cases import compile_case

_IN_PLACE = CompileOptions(in_place_states=True)
_BESIDE = CompileOptions(in_place_states=False)


def _states(graph: LogicalGraph) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        entry.name: torch.rand(graph.tensor(entry.name).shape, generator=generator)
        for entry in graph.inputs
        if entry.kind.is_state
    }


def _taken(plan: PhysicalPlan, rank: int = 0) -> set[str]:
    return {name for actor in plan.by_rank[rank].actors for name in actor.in_place}


def test_new_states_take_the_memory_of_the_old_ones() -> None:
    plan = data_parallel_plan(_IN_PLACE)
    states = _states(mlp())
    session = ReferenceSession(plan, states, ReferenceConfig())
    usual = ReferenceSession(data_parallel_plan(_BESIDE), states, ReferenceConfig())
    before = {name: session.shard(name, 0).data_ptr() for name in states}

    for seed in range(2):
        batch = {"x": torch.rand(8, 4, generator=torch.Generator().manual_seed(seed))}
        session.step(batch, {})
        usual.step(batch, {})

    assert _taken(plan) == set(states)
    assert {name: session.shard(name, 0).data_ptr() for name in states} == before
    found, wanted = session.state_dict(), usual.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_no_second_copy_is_predicted() -> None:
    usual, taken = (data_parallel_plan(options) for options in (_BESIDE, _IN_PLACE))

    def copies(plan: PhysicalPlan) -> int:
        found = lifetimes(plan, Layouts())[0]
        new = [b for b in found.buffers if b.start and b.end == len(found.ticks) - 1]
        return sum(
            b.size_bytes for b in new if b.kind in (MemoryKind.PARAMETERS, MemoryKind.STATES)
        )

    resting = predict_memory(usual).ranks[0].resting
    assert (copies(usual), copies(taken)) == (resting, 0)
    assert predict_memory(taken).peak <= predict_memory(usual).peak


def test_the_plan_says_so_in_its_file() -> None:
    plan = data_parallel_plan(_IN_PLACE)

    assert PLAN.load(PLAN.dump(plan)).hash == plan.hash
    assert plan.hash != data_parallel_plan(_BESIDE).hash
    assert not _taken(data_parallel_plan(_BESIDE))


@pytest.mark.slow
def test_what_boxing_looks_at_before_the_commit_is_overwritten() -> None:
    plan = compile_case("sharded states")  # parameters are gathered for forward and backward

    assert any(a.reads for a in plan.ranks[0].actors if isinstance(a, Collective))
    assert _taken(plan) == {s.name for s in plan.ranks[0].slots if s.kind.is_state and s.sbp}


def test_what_boxing_hands_to_the_updates_of_other_ranks_is_not_overwritten() -> None:
    # The update of a rank with an empty shard once read what another rank had written by then.
    graph = mlp()
    pins = {"batch": "S(0)", "activations": "S(0)", "parameters": "S(0)", "use:parameters": "B"}
    request = PlanRequest(graph=graph, mesh=LINE, cluster=cluster(), pins={})
    strategy = infer_strategy(request, planner="test", pins=pins)

    taken = _taken(compile_plan(graph, strategy, _IN_PLACE))

    weights = {"layers.0.weight", "layers.1.weight"}
    assert taken == set(_states(graph)) - weights


@pytest.mark.parametrize("boxing_thread", [False, True])
def test_a_new_state_that_boxing_makes_is_copied_after_its_firing(boxing_thread: bool) -> None:
    # Such an actor was once said to read the old state too, and refused to box two shards.
    graph, states = mlp(), _states(mlp())
    pins = {"batch": "S(0)", "parameters": "B", "updates": "S(0)", "optimizer_states": "S(0)"}
    request = PlanRequest(graph=graph, mesh=LINE, cluster=cluster(), pins={})
    strategy = infer_strategy(request, planner="test", pins=pins)
    options = CompileOptions(boxing_thread=boxing_thread, bucket_bytes=0)
    usual, taken = (
        compile_plan(graph, strategy, replace(options, in_place_states=in_place))
        for in_place in (False, True)
    )
    boxed = [a for a in taken.ranks[0].actors if isinstance(a, Collective) and a.in_place]

    found, wanted = (ReferenceSession(plan, states, ReferenceConfig()) for plan in (taken, usual))
    for seed in range(2):
        batch = {"x": torch.rand(8, 4, generator=torch.Generator().manual_seed(seed))}
        found.step(batch, {})
        wanted.step(batch, {})

    assert boxed
    new, expected = found.state_dict(), wanted.state_dict()
    assert all(torch.equal(new[name], expected[name]) for name in expected)


def _crossed(view: bool) -> LogicalGraph:
    """Return v and w that trade places; a transposed `w` becomes `v` if `view`."""
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2, 2))
    for name in ("v", "w"):
        b.add_input(name, InputKind.PARAMETER, (2, 2))
    late = {"phase": Phase.OPTIMIZER}
    b.op("g", "neg.default", (Ref("x"),), (2, 2), pointwise=True)
    made = b.op("t", "t.default", (Ref("w"),), (2, 2), **late)
    if not view:
        made = b.op("c", "add.Tensor", (Ref("t"), Ref("g")), (2, 2), pointwise=True, **late)
    new = b.op("n", "add.Tensor", (Ref("w"), Ref("g")), (2, 2), pointwise=True, **late)
    b.outputs.append(GraphOutput(name="v", kind=OutputKind.STATE, value=made))
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value=new))
    return b.graph("crossed")


def test_a_state_whose_view_becomes_another_state_is_not_overwritten() -> None:
    taken = {
        view: _taken(compile_plan(_crossed(view), strategy_of(_crossed(view)), _IN_PLACE))
        for view in (False, True)
    }

    assert taken == {False: {"v", "w"}, True: {"v"}}


def _failing(plan: PhysicalPlan, rank: int, actor_name: str) -> PhysicalPlan:
    """Return the plan with an operator in an actor that fails."""
    part = plan.by_rank[rank]
    broken = Instruction(op="aten.view.default", args=(Ref("x"), (999,)), outputs=("bad",))
    actors = tuple(
        replace(a, instructions=(broken, *a.instructions), reads=("x", *a.reads))
        if a.name == actor_name
        else a
        for a in part.actors
    )
    changed = replace(part, actors=actors)
    return replace(plan, ranks=tuple(changed if p is part else p for p in plan.ranks))


def test_a_step_that_fails_after_the_first_overwritten_state_tears_them() -> None:
    plan = data_parallel_plan(_IN_PLACE)
    (writer,) = {a.name for a in plan.ranks[0].actors if a.in_place}
    session = ReferenceSession(_failing(plan, 1, writer), _states(mlp()), ReferenceConfig())

    with pytest.raises(RunError) as caught:
        session.step({"x": torch.rand(8, 4)}, {})

    assert "overwritten already" in caught.value.todo
    with pytest.raises(RunError, match="the states belong to two steps"):
        session.state_dict()
    with pytest.raises(RunError, match="the states belong to two steps"):
        session.step({"x": torch.rand(8, 4)}, {})
    session.load_state_dict(_states(mlp()))
    assert session.state_dict().keys() == _states(mlp()).keys()


def test_a_step_that_fails_before_leaves_them_whole() -> None:
    plan = data_parallel_plan(_IN_PLACE)
    first = next(a.name for a in plan.ranks[0].actors if isinstance(a, Compute))
    session = ReferenceSession(_failing(plan, 0, first), _states(mlp()), ReferenceConfig())

    with pytest.raises(RunError) as caught:
        session.step({"x": torch.rand(8, 4)}, {})

    assert "from before the step" in caught.value.todo
    assert session.state_dict().keys() == _states(mlp()).keys()
