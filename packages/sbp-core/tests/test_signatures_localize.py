from __future__ import annotations

import pytest

from sbp_core.graph.ir import Ref
from sbp_core.placement import Placement
from sbp_core.signatures import (
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    OpCall,
    Rule,
    RuleRegistry,
    Shards,
    localize,
)
from sbp_core.signatures.localization import varying_axes
from sbp_core.strategy import Signature
from sbp_core.testing.example_calls import call, signature

MESH = Placement.grid((2, 2), axes=("a", "b"))


def _local(call: OpCall, cut: Signature, rank: int, rules: RuleRegistry | None = None) -> LocalCall:
    """Return the only call that a rank executes."""
    (only,) = localize(call, cut, MESH, rank, rules=rules).calls
    return only


def test_most_calls_run_unchanged() -> None:
    mm = call("aten.mm.default", {"x": (4, 6), "w": (6, 8)}, [(4, 8)])

    local = _local(mm, signature(["S(0), B", "B, S(1)"], ["S(0), S(1)"]), 3)

    assert local == LocalCall(op="aten.mm.default", args=(Ref("x"), Ref("w")))


@pytest.mark.parametrize(("rank", "size"), [(0, (2, 2, 8)), (3, (2, 2, 8))])
def test_a_view_gets_the_sizes_of_its_shard(rank: int, size: tuple[int, ...]) -> None:
    heads = call("aten.view.default", {"x": (4, 32)}, [(4, 4, 8)], (4, 4, -1))

    local = _local(heads, signature(["S(0), S(1)"], ["S(0), S(1)"]), rank)

    assert local.args == (Ref("x"), size)


def test_uneven_shards_get_their_own_sizes() -> None:
    ones = call("aten.ones.default", {}, [(5,)], (5,))

    local = [_local(ones, signature([], ["S(0), S(0)"]), rank) for rank in range(4)]

    assert [made.args[0] for made in local] == [(2,), (1,), (1,), (1,)]
    assert local[0].kwargs == ones.kwargs


_VIEW = call("aten.view.default", {"x": (4, 32)}, [(4, 4, 8)], (4, 4, -1))


@pytest.mark.parametrize(
    ("made", "cut", "axes"),
    [
        (_VIEW, signature(["S(0), S(1)"], ["S(0), S(1)"]), (0, 1)),
        (_VIEW, signature(["S(0), B"], ["S(0), B"]), (0,)),
        (_VIEW, signature(["B, S(1)"], ["B, S(1)"]), (1,)),
        (_VIEW, signature(["P, B"], ["P, B"]), ()),
        (call("aten.ones.default", {}, [(5,)], (5,)), signature([], ["B, S(0)"]), (1,)),
        # What has no localiser is the same on all ranks, however it is cut.
        (
            call("aten.mm.default", {"x": (4, 6), "w": (6, 8)}, [(4, 8)]),
            signature(["S(0), B", "B, S(1)"], ["S(0), S(1)"]),
            (),
        ),
    ],
)
def test_ranks_that_differ_along_other_axes_execute_the_same(
    made: OpCall, cut: Signature, axes: tuple[int, ...]
) -> None:
    found = varying_axes(made, cut)

    assert found == axes
    by_place: dict[tuple[int, ...], LocalProgram] = {}
    for rank, coordinate in MESH.coordinates():
        place = tuple(coordinate[axis] for axis in found)
        local = localize(made, cut, MESH, rank)
        assert by_place.setdefault(place, local) == local


def test_third_parties_say_how_their_arguments_change() -> None:
    def half(call: OpCall, shards: Shards) -> LocalCall:
        return LocalCall(op=call.op, args=(*call.args[:1], *shards.output_shape()))

    theirs = call("mylib.pad.default", {"x": (6,)}, [(6,)], 6)
    rules = RuleRegistry({"mylib.pad.default": Rule("n => n", half)})

    local = _local(theirs, signature(["S(0), B"], ["S(0), B"]), 0, rules)

    assert local.args == (Ref("x"), 3)


def test_a_localiser_may_need_several_calls() -> None:
    def centred(call: OpCall, shards: Shards) -> LocalProgram:
        builder = LocalProgramBuilder()
        shifted = builder("aten.sub.Tensor", call.args[0], shards.inputs[0][0][0])
        low, high = builder.several(2, "aten.aminmax.default", shifted)
        return builder.program(builder("aten.add.Tensor", low, high))

    theirs = call("mylib.centre.default", {"x": (6,)}, [()])
    rules = RuleRegistry({"mylib.centre.default": Rule("n! => ()", centred)})

    program = localize(theirs, signature(["B, B"], ["B, B"]), MESH, 0, rules=rules)

    assert [call.op.split(".")[1] for call in program.calls] == ["sub", "aminmax", "add"]
    assert program.calls[1].outputs == ("~1", "~2")
    assert program.calls[2].args == (Ref("~1"), Ref("~2"))
    assert program.results == (Ref("~3"),)
