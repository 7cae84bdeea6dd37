from __future__ import annotations

import pytest

from sbp_core.errors import SbpValueError
from sbp_core.signatures.notation import (
    Dependence,
    Effect,
    Notation,
    increasing,
    linear,
    unread,
)


def test_a_product_has_one_addend_for_all_factors() -> None:
    matmul = Notation.parse("i k, k j -> i j")

    assert matmul.inputs == ((("i",), ("k",)), (("k",), ("j",)))
    assert matmul.outputs == ((("i",), ("j",)),)
    assert matmul.addends == (0, 0)


def test_addends_are_joined_with_plus() -> None:
    assert Notation.parse("j + i k, k j -> i j").addends == (0, 1, 1)


def test_a_group_is_one_dim_of_several_labels() -> None:
    notation = Notation.parse("(b t) d => b t d")

    assert notation.inputs == ((("b", "t"), ("d",)),)
    assert notation.addends is None


def test_a_one_is_a_dim_without_label() -> None:
    assert Notation.parse("b 1 => b").inputs == ((("b",), ()),)


def test_marks_hold_for_the_label_wherever_they_stand() -> None:
    notation = Notation.parse("b+ d!, d => b d")

    assert notation.whole == {"d"}
    assert notation.nonempty == {"b"}


def test_clauses_say_in_what_an_operator_is_linear() -> None:
    notation = Notation.parse("n c!, n => (), (); linear 0 to 0; increasing 0; unread 1")

    assert notation.dependences == (linear(0, outputs=(0,)), increasing(0), unread(1))


def test_reductions_may_differ_by_output() -> None:
    notation = Notation.parse("k => (), (), (); reduce k min; reduce k@1 max; flop 8")

    assert [notation.reduction("k", output) for output in range(3)] == ["min", "max", "min"]
    assert notation.work_flop == 8.0


def test_what_is_summed_away_is_summed_unless_said_otherwise() -> None:
    assert Notation.parse("i k, k j -> i j").reduction("k", 0) == "sum"


def test_nothing_left_of_the_arrow_means_no_arguments() -> None:
    assert Notation.parse("=> n").inputs == ()
    assert Notation.parse("() => n").inputs == ((),)


@pytest.mark.parametrize(
    "text",
    [
        "i k, k j -> i j",
        "j + i k, k j -> i j",
        "(b t+) d! 1 => b t+ d! 1; linear 0; increasing 0; flop 0",
        "=> n",
        "k, k -> ()",
        "n c! => (), (); linear 0 to 0; reduce n max; reduce n@1 min",
        "=> d0; linear",
        "a, b => a; max 0; min 0; falls 1; ignored 1; why the rest is read whole",
        "a, t! => a; linear 0; free 1; unread 1",
        "i, j => i; reduce j max; beside j 0",
        "n (g i), (g o) i -> n (g o); size g 2",
    ],
)
def test_printing_gives_the_text_that_was_read(text: str) -> None:
    assert str(Notation.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("i j", "one arrow"),
        ("i => j => k", "one arrow"),
        ("i + j => i", "for a sum of products"),
        ("i? => i", "a label such as b"),
        ("(i j => i", "a label such as b"),
        ("i => i; smooth 0", "linear, increasing"),
        ("i => i; linear x", "linear, increasing"),
        ("i i -> i", "distinct labels"),
        ("i => i; linear 1", "arguments below 1"),
        ("i => i; linear 0 to 1", "outputs below 1"),
        ("i => i; reduce k max", "labels i"),
        ("i => (); reduce i mean", "sum, max, min"),
        ("i -> i, i", "one output"),
        ("i => i; size k 2", "labels i, extents from 1 on"),
        ("i => i; beside i 1", "arguments below 1"),
    ],
)
def test_a_text_that_cannot_be_meant_is_refused_with_what_would_be(text: str, message: str) -> None:
    with pytest.raises(SbpValueError, match=message):
        Notation.parse(text)


def test_a_dependence_prints_as_its_clause() -> None:
    dependence = Dependence(effect=Effect.LINEAR, inputs=(0, 1), outputs=(1,))

    assert str(dependence) == "linear 0 1 to 1"
