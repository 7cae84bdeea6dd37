from __future__ import annotations

import pytest

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import LogicalGraph, Node, Ref, TensorType
from sbp_core.sbp import NdSbp
from sbp_core.signatures import (
    Notation,
    OpCall,
    Rule,
    RuleRegistry,
    UnknownOperator,
    derive,
    enumerate_signatures,
)
from sbp_core.strategy import Signature
from sbp_core.testing.example_calls import call, texts

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


def test_plain_labels_may_be_split_unevenly_and_into_empty_shards() -> None:
    assert "S(0), B -> S(0)" in texts(derive(MATMUL, 7))


def _fields(value: OpCall) -> dict[str, object]:
    return {name: getattr(value, name) for name in OpCall.__slots__}


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


def test_an_operator_without_rule_is_an_error_that_says_how_to_add_one() -> None:
    unknown = call("mylib.mm.default", [(4,)], [(4,)])

    with pytest.raises(SignatureError, match=r"mylib\.mm\.default") as caught:
        derive(unknown, 2)

    assert "sbp_signatures" in str(caught.value)
    assert "aten.mm.default" in str(caught.value)
    assert "model.py:7" in str(caught.value)


def test_the_fallback_runs_unknown_operators_whole() -> None:
    unknown = call("mylib.mystery.default", [(4, 5)], [(3,)])

    assert texts(derive(unknown, 2, rules=RuleRegistry(unknown=UnknownOperator.WHOLE))) == [
        "B -> B"
    ]


@pytest.mark.parametrize("rule", ["t d! => t d!; linear 0", Rule("t d! => t d!; linear 0")])
def test_third_parties_add_rules_as_text(rule: str | Rule) -> None:
    theirs = call("mylib.rotate.default", [(4, 6)], [(4, 6)])

    found = derive(theirs, 2, rules=RuleRegistry({"mylib.rotate.default": rule}))

    assert texts(found) == ["S(0) -> S(0)", "P -> P", "B -> B"]


def test_third_parties_add_rules_as_functions_of_the_call() -> None:
    def meaning(theirs: OpCall) -> Notation:
        return Notation.parse("a b! => a b!" if theirs.args[1] else "a! b => a! b")

    theirs = call("mylib.scan.default", [(4, 6)], [(4, 6)], False)

    found = derive(theirs, 2, rules=RuleRegistry({"mylib.scan.default": meaning}))

    assert texts(found) == ["S(1) -> S(1)", "B -> B"]


@pytest.mark.parametrize(
    "notation",
    ["a => a", "a b, c => a b", "a a1 => a", "a b => b a", "(a c) b => a b", "1 b => 1 b"],
)
def test_a_rule_that_does_not_fit_the_shapes_is_an_error(notation: str) -> None:
    theirs = call("mylib.scan.default", [(4, 6)], [(4, 6)])
    rules = RuleRegistry({"mylib.scan.default": notation})
    if notation == "(a c) b => a b":
        theirs = call("mylib.scan.default", [(4, 6)], [(3, 6)])

    with pytest.raises(SignatureError, match="does not fit"):
        derive(theirs, 2, rules=rules)


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


def test_signatures_are_values_of_strategies() -> None:
    signature = next(iter(enumerate_signatures(MATMUL, (2, 2))))

    assert isinstance(signature, Signature)
    assert signature.inputs == (NdSbp.parse("S(0), S(0)"), NdSbp.parse("B, B"))
