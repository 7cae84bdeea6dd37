"""A timeline drawn in the columns of a terminal.

Each lane is a row. Where the bars would be too narrow for their labels, the time goes on in a
further band of rows below:

    0 ─────────────── 8            0 ──── 4
    rank 0 │0 1 2 0 1 2 │          rank 0 │0 1 2│
    rank 1 │  0 0 1 1 2 2│         ...
                                   4 ──── 8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median_low

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from sbp_core.timeline import Bar, Lane, Timeline
from sbp_launch.timelines.style import Look, faded, looks_of, short

_MOST_BANDS = 12
"""A picture of more bands than this is drawn with bars that are too narrow for some labels."""


def terminal_lines(timeline: Timeline, *, width: int, coloured: bool) -> list[Text]:
    """Draw a timeline.

    Args:
        timeline: What to draw.
        width: Columns of the terminal, at least 20.
        coloured: Whether colours tell the kinds; otherwise their names do, by the first letter.

    Returns:
        Lines of at most `width` columns; of a timeline without bars, none.
    """
    bars = [bar for lane in timeline.lanes for bar in lane.bars]
    if not timeline.end_s:
        return []
    looks = looks_of(timeline.kinds)
    margin = min(max(cell_len(lane.name) for lane in timeline.lanes), width // 3)
    columns = max(8, width - margin - 2)
    columns_per_s, columns = _scale(bars, timeline.end_s, columns, named=not coloured)
    total = ceil(timeline.end_s * columns_per_s - 1e-9)
    num_bands = ceil(total / columns)
    rows = [_row(lane, looks, columns_per_s, total, coloured=coloured) for lane in timeline.lanes]
    lines: list[Text] = []
    for band in range(num_bands):
        first, last = band * columns, min(total, (band + 1) * columns)
        lines.append(
            _axis(first / columns_per_s, last / columns_per_s, margin, last - first, timeline.unit)
        )
        for lane, row in zip(timeline.lanes, rows, strict=True):
            name = lane.name if cell_len(lane.name) <= margin else f"{lane.name[: margin - 1]}…"
            lines.append(Text(f"{name:<{margin}} │") + row[first:last])
    legend = _legend(looks, coloured=coloured)
    if any(bar.chunk for bar in bars):
        legend.append("  paler: further chunks" if coloured else "  lower case: further chunks")
    return [*lines, legend]


def _scale(bars: Sequence[Bar], end_s: float, columns: int, *, named: bool) -> tuple[float, int]:
    """Return the columns a second, and those of a band.

    A short bar has a whole number of columns, enough for its label, and a band whole bars; where
    that takes too many bands, labels are cut.
    """
    named_bars = [bar for bar in bars if bar.label] or bars
    lengths = [bar.end_s - bar.start_s for bar in named_bars if bar.end_s > bar.start_s]
    lengths = lengths or [end_s]
    short_s = max(min(lengths), median_low(lengths) / 4)
    needed = max(cell_len(bar.label) for bar in bars) + named + 1
    possible = int(columns * short_s / end_s + 1e-9)
    if possible >= needed:
        return min(possible, 2 * needed) / short_s, columns
    if end_s * needed / short_s > _MOST_BANDS * columns:
        return _MOST_BANDS * columns / end_s, columns
    return needed / short_s, max(needed, columns - columns % needed)


def _row(
    lane: Lane, looks: Mapping[str, Look], columns_per_s: float, total: int, *, coloured: bool
) -> Text:
    """Draw one lane in as many columns as it takes; bands are cut out of it."""
    row = Text()
    for bar in lane.bars:
        first = max(len(row), round(bar.start_s * columns_per_s))
        last = min(total, round(bar.end_s * columns_per_s))
        if last <= first:
            continue
        row.append(" " * (first - len(row)))
        sign = bar.kind[:1].lower() if bar.chunk else bar.kind[:1]
        label = bar.label if coloured else f"{sign}{bar.label}"
        fill = " " if coloured else "·"
        label = label if cell_len(label) <= last - first else label[: last - first]
        look = faded(looks[bar.kind], bar.chunk)
        style = Style(color=look.ink, bgcolor=look.fill) if coloured else Style()
        row.append(f"{label:{fill}<{last - first}}", style)
    row.append(" " * (total - len(row)))
    return row


def _axis(first_s: float, last_s: float, margin: int, columns: int, unit: str) -> Text:
    left, right = f"{short(first_s)} ", f" {short(last_s)} {unit}".rstrip()
    line = "─" * max(0, columns - len(left) - len(right))
    return Text(f"{'':<{margin}}  {left}{line}{right}", style="dim")


def _legend(looks: Mapping[str, Look], *, coloured: bool) -> Text:
    legend = Text()
    for kind, look in looks.items():
        sign = f" {kind[:1]} " if coloured else f"{kind[:1]}"
        legend.append(sign, Style(color=look.ink, bgcolor=look.fill) if coloured else Style())
        legend.append(f" {look.name}  ")
    legend.rstrip()
    return legend
