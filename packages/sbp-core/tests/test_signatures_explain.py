from __future__ import annotations

from sbp_core.signatures import RuleRegistry, UnknownOperator
from sbp_core.signatures.explanation import explain_call
from sbp_core.testing.example_calls import call


def test_every_signature_says_where_it_comes_from() -> None:
    rows = explain_call(call("aten.mm.default", [(4, 6), (6, 8)], [(4, 8)]), 2).rows()

    because = {str(inputs): why for inputs, _, why in rows}
    assert because["(S(0), B)"] == "split of label i"
    assert because["(S(1), S(0))"] == (
        "split of label k, which is reduced away: each rank has parts of sums"
    )
    assert because["(P, B)"] == "linear in argument 0"
    assert because["(B, B)"] == "all B"


def test_the_text_is_a_table_with_a_column_for_each_tensor() -> None:
    lines = str(
        explain_call(call("aten.mm.default", [(4096, 1024), (1024, 4096)], [(4096, 4096)]), 2)
    ).splitlines()

    assert lines[0] == "aten.mm.default    i k, k j -> i j"
    assert lines[1] == "  input 0   float32[4096, 1024]   i k"
    assert "  work      34.4 GFLOP" in lines
    head = next(line for line in lines if "because" in line)
    assert head.split() == ["input", "0", "input", "1", "output", "0", "because"]
    assert not any(line != line.rstrip() for line in lines)


def test_an_operator_that_nothing_describes_is_not_explained_by_made_up_labels() -> None:
    rules = RuleRegistry(unknown=UnknownOperator.WHOLE)
    lines = str(
        explain_call(call("aten.linalg_cholesky.default", [(4, 4)], [(4, 4)]), 2, rules=rules)
    ).splitlines()

    assert lines[0].startswith("aten.linalg_cholesky.default    has no rule")
    assert "  input 0   float32[4, 4]" in lines
    assert "not legal here:" not in lines
