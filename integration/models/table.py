"""The results of the matrix as a table: a row for each model, a column for each layout."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from models.trial import Outcome


def matrix(outcomes: Sequence[Outcome], dtype: str) -> Table:
    """Return the table of one dtype: the largest deviation of each cell, or why it did not run."""
    layouts = list(dict.fromkeys(o.layout for o in outcomes))
    table = Table(title=f"{dtype}: deviation of loss (relative) / of any shard / of peak memory")
    table.add_column("model")
    for layout in layouts:
        table.add_column(layout, justify="right")
    found = {(o.program, o.layout): o for o in outcomes if o.dtype == dtype}
    for program in dict.fromkeys(o.program for o in outcomes):
        cells = [found.get((program, layout)) for layout in layouts]
        table.add_row(program, *(cell_text(cell) for cell in cells))
    return table


def cell_text(outcome: Outcome | None) -> str:
    """Return the text of one cell."""
    if outcome is None:
        return ""
    if outcome.error.startswith("no "):
        return "[dim]-[/dim]"
    if outcome.error:
        return "[red]error[/red]"
    colour = "green" if outcome.passed else "red"
    memory = f"{outcome.memory_error:.1%}" if outcome.peaks else "?"
    return f"[{colour}]{outcome.loss_error:.0e} / {outcome.state_error:.0e} / {memory}[/{colour}]"
