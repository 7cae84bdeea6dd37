"""The command `python -m speed`, run in the folder `integration`; see the package."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "speed.md"

#: In place of a machine, versions, commands or a date that were not recorded.
UNKNOWN = "not recorded"

_HEAD = """# Speed

All figures of speed, each with the machine, versions, command and date of its measurement. "Not
recorded" means that nobody wrote this down at the time. Predicted times are marked as such. Measure
on a machine that does nothing else: many differences are smaller than the noise of a busy one.

The page is generated from `integration/speed/figures.json` by `python -m speed document` in the
folder `integration`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One table of figures that were measured together.

    Args:
        title: A heading.
        about: The measured quantities, and the meaning of the columns.
        machine: Its cores and devices, and its other load; `UNKNOWN` if not recorded.
        versions: Versions of Python, PyTorch and other libraries, or `UNKNOWN`.
        date: The date, or `UNKNOWN`.
        command: Commands that repeat the measurement; may be empty.
        columns: The head of the table.
        rows: The rows, with one cell for each column.
        notes: Notes that are needed to judge the figures.
    """

    title: str
    about: str
    machine: str
    versions: str
    date: str
    command: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        named = (self.title, self.about, self.machine, self.versions, self.date)
        if not all(named):
            raise ValueError(
                f"{self.title!r}: machine, versions or date is empty; write {UNKNOWN!r}"
            )
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title!r}: {row} needs {len(self.columns)} cells")


def measurements(path: Path = FIGURES) -> list[Measurement]:
    """Return all measurements of a file.

    Raises:
        ValueError: a measurement lacks a field, has an unknown one, or a row of a wrong length.
    """
    return [_measurement(entry) for entry in json.loads(path.read_text("utf-8"))]


def _measurement(entry: dict[str, Any]) -> Measurement:
    known = {field.name for field in fields(Measurement)}
    if entry.keys() != known:
        raise ValueError(f"{entry.get('title')!r}: has or lacks {sorted(entry.keys() ^ known)}")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return Measurement(**values | {"rows": tuple(tuple(row) for row in entry["rows"])})


def page(found: Sequence[Measurement]) -> str:
    """Return the page of these measurements."""
    return "\n".join([_HEAD, *map(_section, found)])


def _section(one: Measurement) -> str:
    facts = [("Machine", one.machine), ("Versions", one.versions), ("Date", one.date)]
    if not one.command:
        facts.append(("Command", UNKNOWN))
    lines = [f"## {one.title}", "", *_wrapped(one.about), ""]
    for name, value in facts:
        lines += _wrapped(f"{name}: {value}.", bullet=True)
    if one.command:
        commands = [f"$ {command}" for command in one.command]
        reason = "<!-- not run: the figures depend on the machine -->"
        lines += ["", reason, "```console", *commands, "```"]
    lines += ["", _row(one.columns), "|---" * len(one.columns) + "|", *map(_row, one.rows), ""]
    for note in one.notes:
        lines += _wrapped(note, bullet=True)
    return "\n".join(lines + [""] * bool(one.notes))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _wrapped(text: str, *, bullet: bool = False) -> list[str]:
    first, rest = ("- ", "  ") if bullet else ("", "")
    return textwrap.wrap(
        text,
        120,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def main(words: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if the page is out of date."""
    parser = argparse.ArgumentParser(prog="speed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    document = commands.add_parser("document", help="write docs/reference/speed.md")
    document.add_argument("--check", action="store_true", help="only see that it is up to date")
    options = parser.parse_args(words)
    text = page(measurements())
    if not options.check:
        PAGE.write_text(text, "utf-8")
    elif PAGE.read_text("utf-8") != text:
        sys.stdout.write(
            "docs/reference/speed.md is not what figures.json says: python -m speed document\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
