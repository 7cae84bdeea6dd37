"""The consoles on which commands print, and lines of text on them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console

#: Characters of a line in a file or pipe.
FILE_WIDTH = 100

#: Fewest characters of a line, whatever a terminal says: narrower tables show nothing.
_LEAST_WIDTH = 20


def make_console(
    width: int | None = None, *, file: TextIO | None = None, file_width: int | None = None
) -> Console:
    """Return a console, whose lines do not depend on a terminal in files and pipes.

    Args:
        width: Characters of a line, where this process does not write to a terminal, whatever
            its launcher lets it believe.
        file: Where it prints; standard output if None.
        file_width: Characters of a line in files and pipes, if not 100.
    """
    if width is not None:
        return Console(file=file, width=width, force_terminal=False)
    if not (file or sys.stdout).isatty():
        return Console(file=file, width=file_width or FILE_WIDTH)
    console = Console(file=file)
    if console.width >= _LEAST_WIDTH:
        return console
    return Console(file=file, width=_LEAST_WIDTH)


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
