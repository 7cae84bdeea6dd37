"""The budget of lines: what counts, and what is said of a package that is above it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import size


def test_a_package_above_its_budget_is_named_with_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = tmp_path / "budget.toml"
    budget.write_text("[lines]\na = 10\nb = 4\nlost = 1\n", "utf-8")
    monkeypatch.setattr(size, "BUDGET", budget)

    found = size.problems(Counter({("a", "."): 6, ("a", "room"): 4, ("b", "."): 7, ("c", "."): 1}))

    assert found == [
        "b has 7 lines of source, 3 above its budget of 4",
        "c has no budget in budget.toml",
        "lost is no package",
    ]


def test_lines_are_those_of_python_files_below_src() -> None:
    assert size.room_of("packages/planner/src/sbp_planner/osdp.py") == ("planner", ".")
    assert size.room_of("packages/planner/src/sbp_planner/choice/moves.py") == ("planner", "choice")
    assert size.room_of("packages/planner/tests/test_osdp.py") is None
    assert size.room_of("packages/planner/src/sbp_planner/conf/planner/osdp.yaml") is None


def test_the_difference_from_a_revision_is_shown_by_room() -> None:
    now = Counter({("a", "room"): 4, ("a", "new"): 5})
    before = Counter({("a", "room"): 6})

    assert [line.split() for line in size.table(now, before)] == [
        ["a", "9", "+3"],
        ["new", "5", "+5"],
        ["room", "4", "-2"],
        ["all", "packages", "9", "+3"],
    ]


def test_the_packages_keep_to_their_budget() -> None:
    assert size.problems(size.lines_here()) == []
