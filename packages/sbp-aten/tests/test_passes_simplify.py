"""What is shared, and what is not; see `test_passes` for the simple cases."""

from __future__ import annotations

from dataclasses import replace

from sbp_aten.passes import fold_views, share_expressions
from sbp_core.graph import LogicalGraph, Node, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref, ScalarType
from sbp_core.testing.graphs import Builder


def _shared(b: Builder, first: str, second: str) -> bool:
    """Whether two values become one, in a graph that gives back their sum."""
    b.op("both", "add.Tensor", (Ref(first), Ref(second)), b.types[first].shape, pointwise=True)
    b.outputs.append(GraphOutput(name="both", kind=OutputKind.METRIC, value="both"))
    made: LogicalGraph = verify_graph(share_expressions(verify_graph(b.graph())))
    left, right = made.by_name["both"].args
    return bool(left == right)


def _drawn(sites: tuple[int, int], steps: tuple[str, str] = ("step", "step")) -> Builder:
    """Return a graph that draws twice."""
    b = Builder()
    for name in dict.fromkeys(steps):
        b.add_input(name, InputKind.SCALAR, ())
        b.types[name] = ScalarType("int")  # type: ignore[assignment]  # inputs may be scalars
    for name, site, step in zip("ab", sites, steps, strict=True):
        b.op(name, "rand.default", (), (2, 3))
        args = ((2, 3), 7, Ref(step), site)
        b.nodes[-1] = replace(b.nodes[-1], op="sbp.random_uniform.default", args=args)
    return b


def test_numbers_of_one_place_are_drawn_once() -> None:
    assert _shared(_drawn((1, 1)), "a", "b")


def test_numbers_of_two_sites_or_two_steps_are_two() -> None:
    assert not _shared(_drawn((1, 2)), "a", "b")
    assert not _shared(_drawn((1, 1), ("step", "other")), "a", "b")


def test_numbers_that_differ_only_in_kind_are_told_apart() -> None:
    for one, other in ((1, 1.0), (1, True), (0.0, -0.0)):
        b = Builder()
        b.add_input("x", InputKind.BATCH, (2,))
        b.op("a", "mul.Tensor", (Ref("x"), one), (2,))
        b.op("b", "mul.Tensor", (Ref("x"), other), (2,))

        assert not _shared(b, "a", "b")


def test_equal_host_arithmetic_is_done_once_and_what_follows_is_shared_too() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2,))
    b.add_input("lr", InputKind.SCALAR, ())
    b.types["lr"] = ScalarType()  # type: ignore[assignment]  # inputs may be scalars
    for name in ("m", "n"):
        b.nodes.append(Node(name=name, op="host.neg", args=(Ref("lr"),), outputs=(name,)))
        b.types[name] = ScalarType()  # type: ignore[assignment]  # values may be scalars
    b.op("a", "mul.Tensor", (Ref("x"), Ref("m")), (2,))
    b.op("b", "mul.Tensor", (Ref("x"), Ref("n")), (2,))

    assert _shared(b, "a", "b")


def test_two_calls_under_checkpoint_share_nothing() -> None:
    for marks, shared in ((("recompute:1", "recompute:2"), False), (("recompute:1",) * 2, True)):
        b = Builder()
        b.add_input("x", InputKind.BATCH, (2,))
        for name, mark in zip("ab", marks, strict=True):
            b.op(name, "neg.default", (Ref("x"),), (2,))
            b.nodes[-1] = replace(b.nodes[-1], tags=(mark,))

        assert _shared(b, "a", "b") is shared


def test_views_of_one_phase_are_shared_and_those_of_two_are_not() -> None:
    for phase, shared in ((Phase.FORWARD, True), (Phase.BACKWARD, False)):
        b = Builder()
        b.add_input("w", InputKind.PARAMETER, (2, 3))
        b.op("a", "t.default", (Ref("w"),), (3, 2))
        b.op("b", "t.default", (Ref("w"),), (3, 2), phase=phase)

        assert _shared(b, "a", "b") is shared


def _written_and_read(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0
) -> LogicalGraph:
    """Return a graph that writes (2, 3) numbers to 6 places and reads `shape` of them."""
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2, 3))
    b.op("base", "new_zeros.default", (Ref("x"), (6,)), (6,))
    b.op("put", "as_strided_scatter.default", (Ref("base"), Ref("x"), (2, 3), (3, 1), 0), (6,))
    b.op("got", "as_strided.default", (Ref("put"), shape, strides, start), shape)
    b.outputs.append(GraphOutput(name="got", kind=OutputKind.METRIC, value="got"))
    return verify_graph(fold_views(verify_graph(b.graph())))


def test_what_is_read_from_where_it_was_written_is_a_reshape() -> None:
    for shape, strides in (((2, 3, 1), (3, 1, 1)), ((1, 2, 3), (9, 3, 1))):
        (node,) = _written_and_read(shape, strides).nodes

        assert (node.op, node.args) == ("aten.view.default", (Ref("x"), shape))


def test_what_is_read_from_other_places_stays() -> None:
    for shape, strides, start in (((3, 2), (1, 3), 0), ((2, 2), (3, 1), 0), ((2, 3), (1, 1), 0)):
        *_, read = _written_and_read(shape, strides, start).nodes

        assert read.op == "aten.as_strided.default"
