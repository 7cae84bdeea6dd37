"""How far a long reading is: a bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

#: Bytes that are read without a bar: it would be gone before anyone has seen it.
_SMALL_BYTES = 128 * 2**20


@contextmanager
def reading(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are read in the block, on the standard error if that is a terminal.

    Args:
        what: Is read.
        total_bytes: That will be read.

    Yields:
        What is to be told of every part how many bytes it has.
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
