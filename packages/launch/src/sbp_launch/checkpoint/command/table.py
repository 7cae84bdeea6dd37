"""Tables and lines on a console: 100 characters wide in files and pipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_table(
    console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Print rows below their heads; the first and the last column go on below.

    Args:
        console: Where.
        heads: Of the columns.
        rows: Texts.
        right: The heads of columns that are flush right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
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
