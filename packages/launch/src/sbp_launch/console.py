"""Lines of text on a console."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.console import Console


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
