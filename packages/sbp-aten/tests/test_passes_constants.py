from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_aten.passes import fold_constants
from sbp_core.graph import LogicalGraph, Node, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Ref, ScalarType, Symbol
from sbp_core.testing.graphs import Builder
from sbp_torch.ops.operators import bind, operator_of
from sbp_torch.proof.double_precision import graph_to_double
from sbp_torch.runtime.single import run_graph

CPU = Symbol("device", "cpu")


class _Draft(Builder):
    """A graph whose types are what PyTorch makes; every value is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[str, torch.Tensor] = {}

    def add(self, op: str, *args: object, **kwargs: object) -> Ref:
        name = f"v{len(self.nodes)}"
        called = operator_of(f"aten.{op}")
        read = self.samples.__getitem__
        made = called(
            *bind(args, read), **{key: bind(value, read) for key, value in kwargs.items()}
        )
        self.op(name, op, args, tuple(made.shape))
        self.nodes[-1] = replace(self.nodes[-1], kwargs=kwargs)
        dtype = str(made.dtype).removeprefix("torch.")
        self.types[name] = replace(self.types[name], dtype=dtype)
        self.samples[name] = made
        return Ref(name)

    def done(self, *results: Ref) -> LogicalGraph:
        for ref in results:
            self.outputs.append(GraphOutput(name=ref.name, kind=OutputKind.METRIC, value=ref.name))
        return verify_graph(self.graph())


def _same(graph: LogicalGraph, made: LogicalGraph, batch: dict[str, torch.Tensor]) -> bool:
    found, wanted = (run_graph(g, {}, [batch], {})[0] for g in (made, graph))
    return all(
        found[name].dtype == value.dtype
        and torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8),
            value.contiguous().view(-1).view(torch.uint8),
        )
        for name, value in wanted.items()
    )


def test_a_factory_that_is_only_shown_in_another_way_becomes_one_of_that_shape() -> None:
    d = _Draft()
    zeros = d.add("zeros.default", (2, 3), device=CPU)
    shown = d.add("transpose.int", d.add("view.default", zeros, (1, 6)), 0, 1)
    graph = d.done(shown)

    made = verify_graph(fold_constants(graph))

    (node,) = made.nodes
    assert (node.op, node.args) == ("aten.full.default", ((6, 1), 0.0))
    assert node.kwargs["device"] == CPU
    assert _same(graph, made, {})


def test_an_expanded_constant_is_not_written_out() -> None:
    d = _Draft()
    graph = d.done(d.add("expand.default", d.add("ones.default", (1,)), (1000,)))

    assert [node.kind for node in fold_constants(graph).nodes] == ["ones", "expand"]


def test_a_mask_that_is_true_everywhere_goes() -> None:
    d = _Draft()
    d.add_input("mask", InputKind.BATCH, (4,), dtype="bool")
    d.samples["mask"] = torch.empty(4, dtype=torch.bool)
    places = d.add("arange.default", 4)
    both = d.add("bitwise_and.Tensor", d.add("ge.Scalar", places, 0), Ref("mask"))
    graph = d.done(d.add("logical_not.default", both))

    made = verify_graph(fold_constants(graph))

    assert [(node.kind, node.args) for node in made.nodes] == [("logical_not", (Ref("mask"),))]
    assert _same(graph, made, {"mask": torch.tensor([True, False, True, True])})


def test_the_branch_that_is_always_taken_is_what_where_makes() -> None:
    d = _Draft()
    for name in ("x", "y"):
        d.add_input(name, InputKind.BATCH, (3,))
        d.samples[name] = torch.empty(3)
    never = d.add("lt.Scalar", d.add("arange.default", 3), 0)
    graph = d.done(d.add("neg.default", d.add("where.self", never, Ref("x"), Ref("y"))))

    assert [node.args for node in fold_constants(graph).nodes] == [(Ref("y"),)]


def test_values_that_differ_stay_as_they_are() -> None:
    d = _Draft()
    graph = d.done(d.add("view.default", d.add("arange.default", 6), (2, 3)))

    assert fold_constants(graph).nodes == graph.nodes


def test_what_is_made_where_a_tensor_is_stays_there() -> None:
    d = _Draft()
    d.add_input("x", InputKind.BATCH, (3,))
    d.samples["x"] = torch.empty(3)
    graph = d.done(d.add("neg.default", d.add("ones_like.default", Ref("x"))))

    assert [node.kind for node in fold_constants(graph).nodes] == ["ones_like", "neg"]


def _host(name: str, op: str, *args: object) -> Node:
    return Node(name=name, op=f"host.{op}", args=args, outputs=(name,))


def test_host_arithmetic_on_numbers_is_done_at_once() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2,))
    b.nodes = [_host("a", "sub", 1, 0.9), _host("b", "pow", Ref("a"), 2)]
    b.types |= {"a": ScalarType(), "b": ScalarType()}
    b.op("y", "mul.Tensor", (Ref("x"), Ref("b")), (2,))
    b.outputs.append(GraphOutput(name="y", kind=OutputKind.METRIC, value="y"))
    graph = verify_graph(b.graph())

    made = verify_graph(fold_constants(graph))

    assert [node.args for node in made.nodes] == [(Ref("x"), (1 - 0.9) ** 2)]


@pytest.mark.parametrize(("op", "arguments"), [("truediv", (1, 0)), ("pow", (-2.0, 0.5))])
def test_host_arithmetic_that_fails_is_left_to_the_run(
    op: str, arguments: tuple[float, float]
) -> None:
    b = Builder()
    b.nodes = [_host("a", op, *arguments)]
    b.types["a"] = ScalarType()
    b.add_input("x", InputKind.BATCH, (2,))
    b.op("y", "mul.Tensor", (Ref("x"), Ref("a")), (2,))
    b.outputs.append(GraphOutput(name="y", kind=OutputKind.METRIC, value="y"))

    assert [node.op for node in fold_constants(b.graph()).nodes] == [
        f"host.{op}",
        "aten.mul.Tensor",
    ]


def test_random_numbers_are_never_known() -> None:
    d = _Draft()
    drawn = d.add("rand_like.default", d.add("ones.default", (3,)))
    d.nodes[-1] = replace(d.nodes[-1], tags=("seeded",))
    graph = d.done(d.add("neg.default", drawn))

    assert [node.kind for node in fold_constants(graph).nodes] == ["ones", "rand_like", "neg"]


_NUMBERS = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, 0.1, 1 / 3]),
)
_SAME = ("add.Tensor", "sub.Tensor", "mul.Tensor")
_FLOATS = ("neg.default", "t.default")
_TRUTHS = ("ge.Tensor", "lt.Tensor", "eq.Tensor", "ne.Tensor", "le.Tensor", "gt.Tensor")


@st.composite
def _chains(draw: st.DrawFn) -> LogicalGraph:
    d = _Draft()
    dtype = Symbol("dtype", draw(st.sampled_from(["float32", "float64", "int64", "int32"])))
    whole = dtype.name.startswith("int")
    values = []
    for _ in range(2):
        number = draw(_NUMBERS)
        number = draw(st.integers(-9, 9)) if whole else float(number)
        values.append(d.add("full.default", (2, 2), number, dtype=dtype, device=CPU))
    if whole:
        ends = draw(st.sampled_from([(4,), (1, 9, 2), (3, -1, -1)]))
        ops = {1: "arange.default", 3: "arange.start_step"}
        line = d.add(ops[len(ends)], *ends, dtype=dtype, device=CPU)
        values.append(d.add("view.default", line, (2, 2)))
    for _ in range(draw(st.integers(1, 5))):
        first, second = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["same", "one", "number", "to"]))
        if kind == "same":
            values.append(d.add(draw(st.sampled_from(_SAME)), first, second))
        elif kind == "one":
            values.append(d.add(draw(st.sampled_from(_FLOATS)), first))
        elif kind == "number":
            number = draw(st.integers(-3, 3)) if whole else float(draw(_NUMBERS))
            values.append(d.add(draw(st.sampled_from(_SAME)), first, number))
        else:
            to = draw(st.sampled_from(["float32", "float64"]))
            other = d.add("_to_copy.default", first, dtype=Symbol("dtype", to))
            values.append(d.add("_to_copy.default", other, dtype=dtype))
    results = [values[-1]]
    if whole:
        truth = d.add(draw(st.sampled_from(_TRUTHS)), values[-1], values[0])
        results.append(d.add("logical_not.default", truth))
    return d.done(*results)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(_chains())
def test_what_is_computed_before_the_step_is_what_the_step_would_compute(
    graph: LogicalGraph,
) -> None:
    made = verify_graph(fold_constants(graph))

    assert _same(graph, made, {})
    assert _same(graph_to_double(graph), graph_to_double(made), {})


def test_the_same_is_computed_in_double_precision() -> None:
    d = _Draft()
    tenth = d.add("full.default", (), 0.1, device=CPU)
    scaled = d.add("mul.Tensor", d.add("add.Tensor", tenth, 1), 0.3)
    graph = d.done(scaled)

    made = verify_graph(fold_constants(graph))

    assert [(node.kind, node.args) for node in made.nodes] == [("full", ((), (1 + 0.1) * 0.3))]
    assert _same(graph, made, {})
    assert _same(graph_to_double(graph), graph_to_double(made), {})


def test_a_float64_with_the_error_of_a_float32_is_left_to_the_step() -> None:
    d = _Draft()
    tenth = d.add("full.default", (), 0.1, dtype=Symbol("dtype", "float32"), device=CPU)
    wide = d.add("_to_copy.default", tenth, dtype=Symbol("dtype", "float64"))
    graph = d.done(d.add("mul.Tensor", wide, 2))

    made = verify_graph(fold_constants(graph))

    assert _same(graph, made, {})
    assert _same(graph_to_double(graph), graph_to_double(made), {})


@pytest.mark.parametrize("number", [1e30, 1e-30])
def test_what_leaves_the_range_of_float32_is_left_to_the_step(number: float) -> None:
    d = _Draft()
    squared = d.add("mul.Tensor", *[d.add("full.default", (), number, device=CPU)] * 2)
    graph = d.done(d.add("mul.Tensor", squared, squared))

    made = verify_graph(fold_constants(graph))

    assert _same(graph, made, {})
    assert _same(graph_to_double(graph), graph_to_double(made), {})


def test_the_numbers_of_a_folded_constant_outlive_the_file() -> None:
    from sbp_core.graph import GRAPH

    d = _Draft()
    less = d.add("neg.default", d.add("full.default", (2,), math.inf, device=CPU))
    made = fold_constants(d.done(less))

    assert GRAPH.load(GRAPH.dump(made)).nodes == made.nodes


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (1.0, 2.0)])
def test_elements_that_differ_in_a_bit_make_no_full(numbers: tuple[float, float]) -> None:
    d = _Draft()
    line = d.add("arange.start_step", 0, 2, 1, device=CPU)
    real = d.add("_to_copy.default", line, dtype=Symbol("dtype", "float32"))
    # 0 and 1 times zero, or plus one.
    scaled = d.add("mul.Tensor", d.add("neg.default", real), numbers[0])
    graph = d.done(d.add("add.Tensor", scaled, numbers[1]))

    assert _same(graph, fold_constants(graph), {})
