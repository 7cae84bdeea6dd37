from __future__ import annotations

from sbp_core.compile.instructions import named
from sbp_core.graph.ir import Ref
from sbp_core.signatures import LocalProgramBuilder


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
