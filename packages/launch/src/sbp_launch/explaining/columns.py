"""Small tables for a console: cells in columns, the first to the left, figures to the right."""

from __future__ import annotations

from collections.abc import Sequence

_GAP = "  "


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows as lines whose columns are aligned.

    Args:
        rows: Cells, as many in each row. The last column is as long as it is.
        left: So many columns, and the last one, are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left or at == len(row) - 1 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_GAP.join(cells).rstrip())
    return lines


def change_text(before: float, after: float) -> str:
    """Return how a figure changes: `+12%`, `-3.1%`, `=`; nothing if it was zero."""
    if before == after:
        return "="
    if not before:
        return "new"
    change = 100 * (after / before - 1)
    if abs(change) < 0.05:
        return "="
    return f"{change:+.0f}%" if abs(change) >= 10 else f"{change:+.2g}%"
