from __future__ import annotations

import pytest

from sbp_core.compile import compile_plan, instructions
from sbp_core.compile.instructions import named
from sbp_core.graph.ir import Ref
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.signatures import LocalProgram, LocalProgramBuilder, OpCall, localize
from sbp_core.strategy import Signature
from sbp_core.testing.graphs import cluster, mlp


def test_results_of_a_program_bear_the_keys_of_the_node() -> None:
    builder = LocalProgramBuilder()
    shifted = builder("aten.sub.Tensor", Ref("x"), 3)
    program = builder.program(builder("aten.relu.default", shifted))

    made = list(named(program, ("y@0",), "layer.relu"))

    assert [(entry.op, entry.args, entry.outputs) for entry in made] == [
        ("aten.sub.Tensor", (Ref("x"), 3), ("layer.relu~0",)),
        ("aten.relu.default", (Ref("layer.relu~0"),), ("y@0",)),
    ]
    assert {entry.node for entry in made} == {"layer.relu"}


def test_a_shard_that_is_a_result_is_passed_on_under_its_own_key() -> None:
    builder = LocalProgramBuilder()
    total = builder("aten.sum.default", Ref("x"))
    program = builder.program(total, Ref("x"), total)

    made = list(named(program, ("sum", "same", "again"), "node"))

    assert [(entry.op, entry.args, entry.outputs) for entry in made] == [
        ("aten.sum.default", (Ref("x"),), ("again",)),
        ("aten.alias.default", (Ref("again"),), ("sum",)),
        ("aten.alias.default", (Ref("x"),), ("same",)),
    ]


def test_the_only_call_makes_all_outputs() -> None:
    builder = LocalProgramBuilder()
    builder.several(2, "aten.aminmax.default", Ref("x"))
    program = builder.program(Ref("~1"), Ref("~0"))

    (made,) = named(program, ("high", "low"), "node")

    assert made.outputs == ("low", "high")


def test_a_call_is_localised_once_for_all_ranks_at_one_place_on_the_axes_that_cut_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def noted(call: OpCall, cut: Signature, mesh: Placement, rank: int) -> LocalProgram:
        asked.append(rank)
        return localize(call, cut, mesh, rank)

    monkeypatch.setattr(instructions, "localize", noted)
    graph, mesh = mlp((8, 8), batch=8), Placement.grid((2, 4), ("a", "b"))
    strategy = infer_strategy(
        PlanRequest(graph=graph, mesh=mesh, cluster=cluster(num_devices=8)),
        planner="test",
        pins={"x": "S(0), B", "parameters": "B, B", "use:x": "S(0), B"},
    )

    plan = compile_plan(graph, strategy)

    # Rank 4 is the first in the second row of the mesh: the batch is cut along the rows alone.
    assert set(asked) == {0, 4}
    assert len({id(rank.actors) for rank in plan.ranks}) == 1
