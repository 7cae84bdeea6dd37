from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sbp_core.graph.ir import Ref, Symbol, TensorType
from sbp_core.signatures import (
    OpCall,
    derive,
    enumerate_signatures,
    legal_signatures,
    work_flop,
)
from sbp_core.signatures.arguments import call_key
from sbp_core.testing.example_calls import call, texts

MATMUL = call("aten.mm.default", [(4, 6), (6, 8)], [(4, 8)])


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


def test_literals_that_python_holds_equal_are_told_apart() -> None:
    exact = call("aten.arange.default", [], [(6,)], 6, dtype="float32")
    rounded = call("aten.arange.default", [], [(6,)], 6.0, dtype="float32")

    assert call_key(exact) != call_key(rounded)
    assert derive(exact, 2) is not derive(rounded, 2)


def test_users_ask_for_signatures_of_a_tensor_list_and_of_integers() -> None:
    pytest.importorskip("torch")

    cat = legal_signatures("aten.cat.default", [(4, 6), (4, 2)], 1, axis_size=4)
    lookup = legal_signatures("aten.embedding.default", (9, 6), TensorType((4,), "int64"))
    ones = legal_signatures("aten.ones.default", (4,))

    assert texts(cat) == [
        "S(0), S(0) -> S(0)",
        "P, P -> P",
        'P("max"), P("max") -> P("max")',
        'P("min"), P("min") -> P("min")',
        "B, B -> B",
    ]
    assert "S(1), B -> S(1)" in texts(lookup)
    assert texts(ones) == ["-> S(0)", "-> B"]


def test_users_ask_for_signatures_with_tensors_or_shapes() -> None:
    by_tensors = legal_signatures(
        "aten.mm.default", torch.ones(4, 6), torch.ones(6, 8, device="cpu")
    )
    by_shapes = legal_signatures("aten.mm.default", (4, 6), (6, 8))

    assert texts(by_tensors) == texts(by_shapes) == texts(derive(MATMUL, 2))


@pytest.mark.slow
def test_what_operators_mean_is_known_without_torch() -> None:
    program = (
        "import sys, sbp_aten.passes, sbp_aten.rules;"
        "from sbp_core.signatures.rule_registry import installed_rules; installed_rules().ops;"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
