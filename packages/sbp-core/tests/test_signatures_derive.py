from __future__ import annotations

import subprocess
import sys

import pytest

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import Argument, LogicalGraph, Node, Ref, Symbol, TensorType
from sbp_core.sbp import NdSbp
from sbp_core.signatures import (
    Notation,
    OpCall,
    Registry,
    Rule,
    Signature1d,
    Unknown,
    derive,
    enumerate_signatures,
    signatures,
    work_flop,
)
from sbp_core.signatures.arguments import identity
from sbp_core.strategy import Signature


def call(
    op: str,
    inputs: list[tuple[int, ...]],
    outputs: list[tuple[int, ...]],
    *rest: Argument,
    dtype: str = "float32",
    tags: tuple[str, ...] = (),
) -> OpCall:
    names = tuple(f"x{index}" for index in range(len(inputs)))
    return OpCall(
        op=op,
        args=(*map(Ref, names), *rest),
        inputs=tuple(TensorType(shape, dtype) for shape in inputs),
        tensor_names=names,
        outputs=tuple(TensorType(shape, dtype) for shape in outputs),
        tags=tags,
        where=("model.py:7",),
    )


def texts(found: tuple[Signature1d, ...]) -> list[str]:
    return [str(signature) for signature in found]


MATMUL = call("aten.mm.default", [(4, 6), (6, 8)], [(4, 8)])


def test_matmul_has_exactly_six_signatures() -> None:
    assert texts(derive(MATMUL, 2)) == [
        "S(0), B -> S(0)",
        "B, S(1) -> S(1)",
        "S(1), S(0) -> P",
        "P, B -> P",
        "B, P -> P",
        "B, B -> B",
    ]


def test_each_signature_says_where_it_comes_from() -> None:
    assert [signature.origin for signature in derive(MATMUL, 2)] == [
        "split of label i",
        "split of label j",
        "split of label k",
        "linear in argument 0",
        "linear in argument 1",
        "all B",
    ]


@pytest.mark.parametrize(
    "text",
    [
        # data parallel over axis 0, columns of the weight over axis 1
        "(S(0), B) (B, S(1)) -> (S(0), S(1))",
        # data parallel over axis 0, rows of the weight over axis 1
        "(S(0), S(1)) (B, S(0)) -> (S(0), P)",
    ],
)
def test_the_classic_two_dimensional_matmuls_are_found(text: str) -> None:
    assert text in [str(signature) for signature in enumerate_signatures(MATMUL, (2, 2))]


def test_a_mesh_of_two_axes_has_the_product_of_both() -> None:
    assert len(list(enumerate_signatures(MATMUL, (2, 3)))) == 36


def test_signatures_of_a_mesh_are_made_one_by_one() -> None:
    endless = enumerate_signatures(MATMUL, (2,) * 40)

    first = next(endless)

    assert first.outputs == (NdSbp.parse(", ".join(["S(0)"] * 40)),)


def test_a_bias_is_partial_where_the_product_is() -> None:
    addmm = call("aten.addmm.default", [(8,), (4, 6), (6, 8)], [(4, 8)])

    assert texts(derive(addmm, 2)) == [
        "B, S(0), B -> S(0)",
        "S(0), B, S(1) -> S(1)",
        "P, S(1), S(0) -> P",
        "P, P, B -> P",
        "P, B, P -> P",
        'P("max"), B, B -> P("max")',
        'P("min"), B, B -> P("min")',
        "B, B, B -> B",
    ]


def test_plain_labels_may_be_split_unevenly_and_into_empty_shards() -> None:
    assert "S(0), B -> S(0)" in texts(derive(MATMUL, 7))


def view(source: tuple[int, ...], target: tuple[int, ...]) -> OpCall:
    return call("aten.view.default", [source], [target], target)


@pytest.mark.parametrize(
    ("source", "target", "size", "splits"),
    [
        ((6, 4), (2, 3, 4), 2, ["S(0) -> S(0)", "S(1) -> S(2)"]),
        ((6, 4), (2, 3, 4), 3, ["S(1) -> S(2)"]),  # 2 is not divisible by 3
        ((6, 4), (2, 3, 4), 4, ["S(1) -> S(2)"]),
        ((2, 3, 4), (6, 4), 2, ["S(0) -> S(0)", "S(2) -> S(1)"]),
        ((6, 4), (4, 6), 2, ["S(0) -> S(0)"]),
        ((6, 4), (4, 6), 3, []),
        ((5, 1, 4), (5, 4), 3, ["S(0) -> S(0)", "S(2) -> S(1)"]),
        ((4, 6), (24,), 4, ["S(0) -> S(0)"]),
        ((8, 64), (8, 4, 16), 4, ["S(0) -> S(0)", "S(1) -> S(1)"]),
    ],
)
def test_a_view_splits_the_slowest_factor_that_both_shapes_share(
    source: tuple[int, ...], target: tuple[int, ...], size: int, splits: list[str]
) -> None:
    found = texts(derive(view(source, target), size))

    assert [text for text in found if text.startswith("S")] == splits
    assert "P -> P" in found
    assert "B -> B" in found


def test_axes_that_split_one_group_need_their_product_to_divide() -> None:
    heads = view((8, 24), (8, 6, 4))

    found = {str(signature) for signature in enumerate_signatures(heads, (2, 2))}
    wider = {str(signature) for signature in enumerate_signatures(heads, (2, 3))}

    assert "(S(1), B) -> (S(1), B)" in found
    assert "(S(1), S(1)) -> (S(1), S(1))" not in found  # 6 heads on 4 ranks
    assert "(S(1), S(1)) -> (S(1), S(1))" in wider
    assert "(S(0), S(1)) -> (S(0), S(1))" in found


def test_heads_of_attention_are_not_split_into_empty_shards() -> None:
    shape = (2, 3, 5, 4)
    attention = call(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        [shape, shape, shape],
        [shape, shape[:3]],
        0.0,
        True,
    )

    assert "S(1), S(1), S(1) -> S(1), S(1)" in texts(derive(attention, 3))
    assert "S(1), S(1), S(1) -> S(1), S(1)" not in texts(derive(attention, 4))


def test_attention_with_dropout_stays_whole() -> None:
    shape = (2, 3, 5, 4)
    attention = call(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        [shape, shape, shape],
        [shape, shape[:3]],
        0.1,
    )

    assert not [text for text in texts(derive(attention, 2)) if text.startswith("S")]


def test_a_label_missing_in_one_output_is_partial_there() -> None:
    data, ones, weight = (4, 3, 8), (4, 3, 1), (8,)
    backward = call(
        "aten.native_layer_norm_backward.default",
        [data, data, ones, ones, weight, weight],
        [data, weight, weight],
    )
    args = (*backward.args[:2], (8,), *backward.args[2:], (True, True, True))
    found = texts(derive(OpCall(**{**_fields(backward), "args": args}), 2))

    assert found[0] == "S(0), S(0), S(0), S(0), B, B -> S(0), P, P"


def _fields(value: OpCall) -> dict[str, object]:
    return {name: getattr(value, name) for name in OpCall.__slots__}


def test_pointwise_operators_need_only_their_tag() -> None:
    add = call("aten.add.Tensor", [(4, 6), (6,)], [(4, 6)], tags=("pointwise",))

    assert texts(derive(add, 2)) == [
        "S(0), B -> S(0)",
        "S(1), S(0) -> S(1)",
        "P, P -> P",
        'P("max"), B -> P("max")',
        'P("min"), B -> P("min")',
        'B, P("max") -> P("max")',
        'B, P("min") -> P("min")',
        "B, B -> B",
    ]


def test_adding_a_host_scalar_is_not_linear() -> None:
    add = call("aten.add.Tensor", [(4,)], [(4,)], Ref("step"), tags=("pointwise",))

    assert texts(derive(add, 2)) == [
        "S(0) -> S(0)",
        'P("max") -> P("max")',
        'P("min") -> P("min")',
        "B -> B",
    ]


def test_scaling_by_a_host_scalar_is_linear() -> None:
    mul = call("aten.mul.Tensor", [(4,)], [(4,)], Ref("rate"), tags=("pointwise",))

    assert texts(derive(mul, 2)) == ["S(0) -> S(0)", "P -> P", "B -> B"]


def test_the_same_tensor_twice_counts_as_two_arguments() -> None:
    square = OpCall(
        op="aten.mul.Tensor",
        args=(Ref("x"), Ref("x")),
        inputs=(TensorType((4,), "float32"),) * 2,
        tensor_names=("x", "x"),
        outputs=(TensorType((4,), "float32"),),
        tags=("pointwise",),
    )

    assert texts(derive(square, 2)) == ["S(0), S(0) -> S(0)", "P, B -> P", "B, P -> P", "B, B -> B"]


def test_random_pointwise_operators_stay_whole() -> None:
    noise = call("my.noise.default", [(4,)], [(4,)], tags=("pointwise", "seeded"))

    assert texts(derive(noise, 2)) == ["B -> B"]


def test_rounding_to_integers_is_not_linear() -> None:
    x = call("aten._to_copy.default", [(4,)], [(4,)])
    rounded = OpCall(
        **{
            **_fields(x),
            "outputs": (TensorType((4,), "int64"),),
            "kwargs": {"dtype": Symbol("dtype", "int64")},
        }
    )

    assert "P -> P" in texts(derive(x, 2))
    assert "P -> P" not in texts(derive(rounded, 2))


def test_an_operator_without_rule_is_an_error_that_says_how_to_add_one() -> None:
    unknown = call("mylib.mm.default", [(4,)], [(4,)])

    with pytest.raises(SignatureError, match=r"mylib\.mm\.default") as caught:
        derive(unknown, 2)

    assert "sbp_signatures" in str(caught.value)
    assert "aten.mm.default" in str(caught.value)
    assert "model.py:7" in str(caught.value)


def test_the_fallback_runs_unknown_operators_whole() -> None:
    unknown = call("mylib.mystery.default", [(4, 5)], [(3,)])

    assert texts(derive(unknown, 2, rules=Registry(unknown=Unknown.WHOLE))) == ["B -> B"]


@pytest.mark.parametrize("rule", ["t d! => t d!; linear 0", Rule("t d! => t d!; linear 0")])
def test_third_parties_add_rules_as_text(rule: str | Rule) -> None:
    theirs = call("mylib.rotate.default", [(4, 6)], [(4, 6)])

    found = derive(theirs, 2, rules=Registry({"mylib.rotate.default": rule}))

    assert texts(found) == ["S(0) -> S(0)", "P -> P", "B -> B"]


def test_third_parties_add_rules_as_functions_of_the_call() -> None:
    def meaning(theirs: OpCall) -> Notation:
        return Notation.parse("a b! => a b!" if theirs.args[1] else "a! b => a! b")

    theirs = call("mylib.scan.default", [(4, 6)], [(4, 6)], False)

    found = derive(theirs, 2, rules=Registry({"mylib.scan.default": meaning}))

    assert texts(found) == ["S(1) -> S(1)", "B -> B"]


@pytest.mark.parametrize(
    "notation",
    ["a => a", "a b, c => a b", "a a1 => a", "a b => b a", "(a c) b => a b", "1 b => 1 b"],
)
def test_a_rule_that_does_not_fit_the_shapes_is_an_error(notation: str) -> None:
    theirs = call("mylib.scan.default", [(4, 6)], [(4, 6)])
    rules = Registry({"mylib.scan.default": notation})
    if notation == "(a c) b => a b":
        theirs = call("mylib.scan.default", [(4, 6)], [(3, 6)])

    with pytest.raises(SignatureError, match="does not fit"):
        derive(theirs, 2, rules=rules)


@pytest.mark.parametrize(
    ("made", "flop"),
    [
        (MATMUL, 2 * 4 * 6 * 8),
        (call("aten.addmm.default", [(8,), (4, 6), (6, 8)], [(4, 8)]), 2 * 4 * 6 * 8 + 4 * 8),
        (call("aten.relu.default", [(4, 6)], [(4, 6)], tags=("pointwise",)), 24),
        (call("aten.sum.default", [(4, 6)], [()]), 24),
        (view((4, 6), (24,)), 0),
    ],
)
def test_work_is_read_off_the_notation(made: OpCall, flop: float) -> None:
    assert work_flop(made) == flop


def test_the_call_of_a_node_leaves_host_scalars_out() -> None:
    node = Node(
        name="mul", op="aten.mul.Tensor", args=(Ref("x"), Ref("rate")), outputs=("y",),
        tags=("pointwise",), source="model.py:3",
    )  # fmt: skip
    kinds = {"x": TensorType((4,), "float32"), "y": TensorType((4,), "float32")}
    graph = LogicalGraph(
        name="g", inputs=(), outputs=(), nodes=(node,), types={**kinds, "rate": _scalar()}
    )

    made = OpCall.of(graph, node)

    assert made.tensor_names == ("x",)
    assert texts(derive(made, 2)) == ["S(0) -> S(0)", "P -> P", "B -> B"]


def _scalar() -> object:
    from sbp_core.graph.ir import ScalarType

    return ScalarType()


def test_equal_calls_under_other_names_are_derived_once() -> None:
    other = OpCall(**{**_fields(MATMUL), "args": (Ref("a"), Ref("b")), "tensor_names": ("a", "b")})

    assert derive(other, 2) is derive(MATMUL, 2)


def test_literals_that_python_holds_equal_are_told_apart() -> None:
    exact = call("aten.arange.default", [], [(6,)], 6, dtype="float32")
    rounded = call("aten.arange.default", [], [(6,)], 6.0, dtype="float32")

    assert identity(exact) != identity(rounded)
    assert derive(exact, 2) is not derive(rounded, 2)


def test_users_ask_for_signatures_with_tensors_or_shapes() -> None:
    torch = pytest.importorskip("torch")

    by_tensors = signatures("aten.mm.default", torch.ones(4, 6), torch.ones(6, 8, device="cpu"))
    by_shapes = signatures("aten.mm.default", (4, 6), (6, 8))

    assert texts(by_tensors) == texts(by_shapes) == texts(derive(MATMUL, 2))


def test_users_ask_for_signatures_of_a_tensor_list_and_of_integers() -> None:
    pytest.importorskip("torch")

    cat = signatures("aten.cat.default", [(4, 6), (4, 2)], 1, axis_size=4)
    lookup = signatures("aten.embedding.default", (9, 6), TensorType((4,), "int64"))
    ones = signatures("aten.ones.default", (4,))

    assert texts(cat) == [
        "S(0), S(0) -> S(0)",
        "P, P -> P",
        'P("max"), P("max") -> P("max")',
        'P("min"), P("min") -> P("min")',
        "B, B -> B",
    ]
    assert "S(1), B -> S(1)" in texts(lookup)
    assert texts(ones) == ["-> S(0)", "-> B"]


def test_signatures_are_values_of_strategies() -> None:
    signature = next(iter(enumerate_signatures(MATMUL, (2, 2))))

    assert isinstance(signature, Signature)
    assert signature.inputs == (NdSbp.parse("S(0), S(0)"), NdSbp.parse("B, B"))


def test_the_algebra_imports_no_torch() -> None:
    program = (
        "import sys; import sbp_core.signatures, sbp_torch.testing.signatures; "
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
