from __future__ import annotations

from sbp_core.signatures import explain


def test_maxima_are_not_called_sums() -> None:
    rows = explain("aten.amax.default", (4, 6), [0]).rows()

    assert "each rank has parts of maxima" in rows[1][2]


def test_candidates_that_are_not_legal_say_why_not() -> None:
    softmax = explain("aten._softmax.default", (4, 6), 1, False)
    view = explain("aten.view.default", (6, 4), [24], axis_size=4)

    assert "aten._softmax.default needs that dim whole" in softmax.refused[0][2]
    assert any("needs 6 to be divisible by 4" in why for _, _, why in view.refused)
    assert any("only the slowest factor of dim 0 may be split" in why for _, _, why in view.refused)


def test_what_is_legal_behind_other_axes_says_which() -> None:
    text = str(explain("aten.view.default", (6,), [2, 3]))

    assert "legal on an axis after earlier axes:" in text
    assert "earlier axes split label g0 into 2 parts" in text


def test_no_line_is_wider_than_a_terminal() -> None:
    calls = [
        explain("aten._softmax.default", (8, 16, 512), -1, False),
        explain("aten._foreach_add.List", [(4, 4)] * 9, [(4, 4)] * 9),
        explain("aten.convolution.default", (2, 3, 8, 8), (5, 3, 3, 3), (5,), *[[1, 1]] * 3,
                False, [0, 0], 1),
    ]  # fmt: skip

    assert max(len(line) for entry in calls for line in str(entry).splitlines()) <= 100


def test_a_table_too_wide_for_columns_has_an_entry_for_each_signature() -> None:
    lines = str(explain("aten._foreach_neg.default", [(4, 4)] * 6)).splitlines()

    first = lines.index("  S(0), B, B, B, B, B -> S(0), B, B, B, B, B")
    assert lines[first + 1] == "      because: split of label p0_d0"


def test_a_call_may_be_asked_for_by_shapes() -> None:
    because = {str(ins): why for ins, _, why in explain("aten.mm.default", (4, 6), (6, 8)).rows()}

    assert because["(S(0), B)"] == "split of label i"
