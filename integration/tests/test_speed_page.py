"""`docs/reference/speed.md` is what the recorded measurements say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repository import ROOT
from speed.__main__ import FIGURES, main, measurements, page


def test_the_page_shows_the_recorded_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["document", "--check"]) == 0, capsys.readouterr().out


def test_each_measurement_says_machine_versions_command_and_date() -> None:
    text = page(measurements())

    for part in text.split("\n## ")[1:]:
        for fact in ("- Machine: ", "- Versions: ", "- Date: "):
            assert fact in part
        assert "\n$ " in part or "- Command: not recorded." in part


def test_commands_name_programs_that_there_are() -> None:
    words = [word for one in measurements() for text in one.command for word in text.split()]

    programs = [word for word in words if word.startswith("integration/")]
    assert programs
    assert [path for path in programs if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"date": ""}, "date is empty; write 'not recorded'"),
        ({"rows": [["1"]]}, "needs 2 cells"),
        ({"speed": "fast"}, "has or lacks \\['speed'\\]"),
    ],
)
def test_a_measurement_that_is_incomplete_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    entry = {
        "title": "A step",
        "about": "Its time.",
        "machine": "two cores",
        "versions": "not recorded",
        "date": "not recorded",
        "command": [],
        "columns": ["way", "time"],
        "rows": [["ours", "1 s"]],
        "notes": [],
    }
    file = tmp_path / FIGURES.name
    file.write_text(json.dumps([entry | change]), "utf-8")

    with pytest.raises(ValueError, match=message):
        measurements(file)
