"""The table of stories names tests that there are, and counts what they say."""

from __future__ import annotations

import ast
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stories import running
from stories.__main__ import main
from stories.proofs import ROOT, Command, Missing, NamedTests
from stories.table import STORIES

PROOFS = [proof for story in STORIES for each in story.criteria for proof in each.proofs]


def test_every_story_is_there_and_every_criterion_has_a_proof_or_says_that_it_lacks_one() -> None:
    assert [story.number for story in STORIES] == list(range(1, 11))
    assert all(each.proofs for story in STORIES for each in story.criteria)
    assert all(proof.why for proof in PROOFS if isinstance(proof, Missing))


def test_every_test_that_is_named_as_a_proof_is_there() -> None:
    named = [proof for proof in PROOFS if isinstance(proof, NamedTests)]

    missing = [f"{proof}: {name}" for proof in named for name in proof.missing()]

    assert not missing


def test_a_test_that_is_not_there_is_found() -> None:
    assert NamedTests("integration", "test_stories", ("test_nothing",)).missing() == [
        "test_nothing"
    ]
    assert NamedTests("integration", "test_nothing").missing() == [
        "integration/tests/test_nothing.py"
    ]


def test_every_program_and_session_that_is_named_as_a_proof_is_there_with_its_options() -> None:
    noxfile = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))
    sessions = {node.name for node in noxfile.body if isinstance(node, ast.FunctionDef)}
    gone = []
    for words in (proof.words for proof in PROOFS if isinstance(proof, Command)):
        if words[2] == "nox":
            session = words[words.index("-s") + 1]
            gone += [] if session.partition("(")[0] in sessions else [session]
            continue
        files = [ROOT / "integration" / f"{words[2]}{end}" for end in (".py", "/__main__.py")]
        source = "".join(path.read_text("utf-8") for path in files if path.exists())
        options = [word for word in words if word.startswith("--")]
        gone += [f"{words[2]} {option}" for option in options if f'"{option}"' not in source]
        gone += [] if source else [words[2]]

    assert not gone


def test_cases_are_counted_by_test_and_examples_by_property() -> None:
    report = ElementTree.fromstring(
        """<suite>
          <testcase classname="tests.test_one" name="test_a[1]"/>
          <testcase classname="tests.test_one" name="test_a[2]"><skipped/></testcase>
          <testcase classname="tests.test_one" name="test_ab"/>
          <testcase classname="tests.test_one.TestKit" name="test_c"/>
          <testcase classname="tests.test_one" name="test_property"/>
          <testcase classname="tests.test_two" name="test_a"><failure>why</failure></testcase>
        </suite>"""
    )
    cases = list(report.iter("testcase"))
    printed = "tests/test_one.py::test_property:\n\n  - 500 passing, 0 failing, and 48 invalid\n"
    examples = running.examples_of(printed)

    def outcome(file: str, *names: str) -> running.Outcome:
        return running._outcome(NamedTests("integration", file, names), cases, examples)

    assert outcome("test_one", "test_a") == running.Outcome(count=1, skipped=1)
    assert outcome("test_one", "TestKit").count == 1
    assert outcome("test_one", "test_property").count == 500
    assert outcome("test_one").count == 503
    assert outcome("test_two").failed == 1 and "why" in outcome("test_two").text


@pytest.mark.parametrize(
    ("program", "count", "failed"),
    [
        ("print('3 kills'); print('1,000 kills')", 1003, 0),
        ("print('no figures')", 0, 1),
        ("print('5 kills'); raise SystemExit(1)", 5, 1),
    ],
)
def test_the_cases_of_a_program_are_those_of_which_it_tells(
    program: str, count: int, failed: int
) -> None:
    outcome = running._run_command(Command(("python", "-c", program), r"([\d,]+) kills"))

    assert (outcome.count, outcome.failed) == (count, failed)


def test_the_list_runs_nothing_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    code = main(["--list", "9"])

    printed = capsys.readouterr().out
    assert code == 0
    assert "9 Packages alone" in printed and "missing" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert not Path("report.xml").exists()
