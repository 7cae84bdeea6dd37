"""Notations as text for calls of any rank: what a text with runs is for some shapes."""

from __future__ import annotations

import pytest

from sbp_aten.rules.formula import by_operator, notation, stated
from sbp_core.errors import SignatureError
from sbp_core.graph import TensorType
from sbp_core.signatures import OpCall, Rule
from sbp_core.signatures.extents import label_sizes

Shape = tuple[int, ...]


def call(inputs: list[Shape], *outputs: Shape) -> OpCall:
    return OpCall(
        op="lib.op.default",
        args=(),
        inputs=tuple(TensorType(shape, "float32") for shape in inputs),
        tensor_names=tuple(f"x{index}" for index in range(len(inputs))),
        outputs=tuple(TensorType(shape, "float32") for shape in outputs),
    )


@pytest.mark.parametrize(
    ("places", "text"),
    [((), "v d, () => d"), ((5,), "v d, i0 => i0 d"), ((5, 2), "v d, i0 i1 => i0 i1 d")],
)
def test_a_run_is_as_long_as_the_dims_that_are_left(places: Shape, text: str) -> None:
    made = notation(call([(7, 3), places], (*places, 3)), "v d, i* => i* d")

    assert str(made) == text


def test_marks_and_clauses_of_a_run_are_those_of_each_label() -> None:
    made = notation(call([(4, 5)], ()), "d*+ => (); reduce d* max")

    assert str(made) == "d0+ d1+ => (); reduce d0 max; reduce d1 max"


def test_a_length_may_be_given_where_no_shape_tells_it() -> None:
    made = notation(call([(4, 5, 6)], (4, 1, 1)), "d* n*! => d* 1 1; why so", n=2)

    assert str(made) == "d0 n0! n1! => d0 1 1; why so"


def test_leading_dims_are_broadcast_from_the_right() -> None:
    made = notation(call([(2, 3, 4, 5), (1, 6, 5)], (2, 3, 4, 6)), "... p m, ... r m => ... p r")

    assert str(made) == "d0 d1 p m, 1 r m => d0 d1 p r"


def test_an_operator_without_tensors_makes_what_its_outputs_say() -> None:
    assert str(notation(call([], (3, 4)), "=> d*; linear")) == "=> d0 d1; linear"


def test_addends_stay_addends() -> None:
    made = notation(call([(2, 3, 4), (5, 4), (5,)], (2, 3, 5)), "d* k, j k + j -> d* j")

    assert str(made) == "d0 d1 k, j k + j -> d0 d1 j"


def test_a_reason_is_given_only_for_labels_that_need_one() -> None:
    text = "d* => d*; linear 0; why it is so; and more so"

    assert str(notation(call([(3,)], (3,)), text)) == "d0 => d0; linear 0"
    assert notation(call([(3,)], (3,)), text.replace("d* =>", "d*! =>")).why == (
        "it is so; and more so"
    )


def test_a_call_of_other_ranks_does_not_fit() -> None:
    with pytest.raises(SignatureError, match="does not fit"):
        label_sizes(call([(3,), (4,)], (3,)), notation(call([(3,)], (3,)), "d* => d*"))


def test_lists_of_operators_have_one_rule() -> None:
    rule: Rule = stated("d* => d*")

    found = by_operator({"relu sum.dim": rule})

    assert found == {"aten.relu.default": rule, "aten.sum.dim": rule}
