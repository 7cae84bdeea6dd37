"""The text of `explain=`: a pattern, and perhaps an SBP; and how the command line quotes it."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_launch.apps.plan import PlanConfig, with_quoted_question
from sbp_launch.explaining.question import Question


@pytest.mark.parametrize(
    ("text", "pattern", "value"),
    [
        ("blocks.3.mlp.up", "blocks.3.mlp.up", None),
        ("blocks.3.mlp.up: S(1)", "blocks.3.mlp.up", "S(1)"),
        ("blocks.3.mlp.up:S(1)", "blocks.3.mlp.up", "S(1)"),
        ("use:head.weight", "use:head.weight", None),
        ("use:head.weight: S(0), B", "use:head.weight", "S(0), B"),
        ("*.up.*: {tensor: S(0)}", "*.up.*", {"tensor": "S(0)"}),
        ('up: {data: "B", tensor: S(-1)}', "up", {"data": "B", "tensor": "S(-1)"}),
    ],
)
def test_a_pattern_and_perhaps_an_sbp_are_asked_for(text: str, pattern: str, value: object) -> None:
    found = Question.parse(text)

    assert (found.pattern, found.value) == (pattern, value)
    assert Question.parse(found.text) == found


@pytest.mark.parametrize("text", ["", "two words", "up: S(", "up: {tensor S(0)}", "up: {a: S(0)"])
def test_what_cannot_be_meant_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="explain") as caught:
        PlanConfig(explain=text)

    assert caught.value.accepted


def hydra_reads(argument: str) -> object:
    (override,) = OverridesParser.create().parse_overrides([argument])
    return override.value()


@pytest.mark.parametrize("text", ["up: S(1)", "up: {tensor: S(0)}", "'up: S(1)'", "b.*", "it's: B"])
def test_hydra_reads_what_is_asked_as_it_was_typed(text: str) -> None:
    (argument, other) = with_quoted_question([f"explain={text}", "cluster.mesh=[4]"])

    assert hydra_reads(argument) == text.strip("'")
    assert other == "cluster.mesh=[4]"


@given(st.text("abc.*:S(0), {}[]'\\=-", min_size=1).filter(lambda text: text[0] not in "'"))
def test_whatever_is_asked_is_one_value_for_hydra(text: str) -> None:
    (argument,) = with_quoted_question([f"explain={text}"])

    assert hydra_reads(argument) == text


def test_why_is_the_former_name_of_explain(capsys: pytest.CaptureFixture[str]) -> None:
    (argument,) = with_quoted_question(["why=up: S(1)"])

    assert (argument.partition("=")[0], hydra_reads(argument)) == ("explain", "up: S(1)")
    assert "why= has a new name: explain=" in capsys.readouterr().err
