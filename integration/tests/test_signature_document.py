"""`docs/reference/signatures.md` is what the rules say, and every stored call is still answered."""

from __future__ import annotations

from sbp_core.signatures import derive, installed_rules
from signatures import document
from signatures.canonical import read


def test_the_document_is_what_the_rules_say() -> None:
    written = document.FILE.read_text("utf-8")

    assert written == document.document(), "run `python -m signatures.document` in integration/"


def test_every_operator_with_a_rule_is_in_the_document() -> None:
    written = document.FILE.read_text("utf-8")

    assert [op for op in installed_rules().ops if f"`{op}`" not in written] == []


def test_the_stored_calls_are_many_and_all_have_signatures() -> None:
    calls = list(read())

    assert len(calls) > 600
    assert all(derive(call, 2) for call in calls)
