"""Terminal output of all commands: consoles, wrapped lines, tables, progress bars of reading."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

#: Line width in characters for files and pipes, and the smallest width for a terminal.
FILE_WIDTH, _LEAST_WIDTH = 100, 40


def make_console(width: int | None = None, *, file: TextIO | None = None) -> Console:
    """Return a console, with lines of 100 characters if it does not write to a terminal.

    It prints texts as they are: names and paths may contain rich's markup (`[data]`) or emoji codes
    (`:on:`).

    Args:
        width: Line width for a process that does not write to a terminal, even if its launcher
            gives it a pseudo-terminal.
        file: The output file; standard output if None.
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
    """Print lines as they are; long lines are wrapped with indentation."""
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


_GAP = "  "


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows as lines whose columns are aligned.

    Args:
        rows: Cells, equally many in each row. The last column may have any width.
        left: Number of first columns that are aligned to the left; if > 0, also the last one.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left or (left and at == len(row) - 1) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_GAP.join(cells).rstrip())
    return lines


def change_text(before: float, after: float) -> str:
    """Return the relative change of a figure: `+12%`, `-3.1%`, `=`; `new` if it was zero."""
    if before == after:
        return "="
    if not before:
        return "new"
    change = 100 * (after / before - 1)
    if abs(change) < 0.05:
        return "="
    return f"{change:+.0f}%" if abs(change) >= 10 else f"{change:+.2g}%"


def plain_table() -> Table:
    """Return a table without lines, with bold heads."""
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))


def show_table(
    console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Print a table; long cells of the first and the last column are wrapped.

    Args:
        console: The console to print to.
        heads: Heads of the columns.
        rows: Texts of the cells.
        right: Heads of the columns that are aligned to the right.
    """
    table = plain_table()
    for number, head in enumerate(heads):
        is_first, is_last = number == 0, number + 1 == len(heads)
        table.add_column(
            head,
            justify="right" if head in right else "left",
            overflow="fold",
            no_wrap=not (is_first or is_last),
            max_width=console.width // 4 if is_last else None,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        text = Text.from_ansi(line)
        text.rstrip()
        console.print(text, soft_wrap=True)


#: Fewer bytes are read without a bar, because it would disappear too soon.
_SMALL_BYTES = 128 * 2**20


@contextmanager
def reading(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of the bytes read in the block, on stderr if that is a terminal.

    Yields:
        A function to call with the number of bytes of each part that was read.
    """
    console = Console(stderr=True)
    if total_bytes < _SMALL_BYTES or not console.is_terminal:
        yield lambda _: None
        return
    columns = (BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        TextColumn("{task.description}", markup=False), *columns, console=console, transient=True
    ) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda size: bar.advance(task, size)
