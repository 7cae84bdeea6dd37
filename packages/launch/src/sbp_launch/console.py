"""Consoles, and lines of text on them: the one place that makes them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import TextIO

from rich.console import Console

#: Characters of a line in files and pipes, and the fewest of one on a terminal.
FILE_WIDTH, _LEAST_WIDTH = 100, 40


def make_console(width: int | None = None, *, file: TextIO | None = None) -> Console:
    """Return a console whose lines have 100 characters where it writes to no terminal.

    It prints texts as they are: names and paths may hold what rich takes for markup (`[data]`) or
    for an emoji (`:on:`).

    Args:
        width: Characters of a line, where this process does not write to a terminal, whatever
            its launcher lets it believe.
        file: Where it writes; the standard output if None.
    """
    plain = partial(Console, file=file, markup=False, emoji=False, highlight=False)
    if width is not None:
        return plain(width=width, force_terminal=False)
    out = file or sys.stdout
    if not out.isatty():
        return plain(width=FILE_WIDTH)
    console = plain()
    console.width = max(console.width, _LEAST_WIDTH)
    return console


def say(console: Console, lines: Iterable[str]) -> None:
    """Print lines as they are; what does not fit goes on below, indented."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        parts = textwrap.wrap(
            line.strip(),
            console.width,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for part in parts:
            console.print(part, highlight=False, markup=False, soft_wrap=True)
