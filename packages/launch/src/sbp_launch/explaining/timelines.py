"""Draw a `sbp_core.timeline.Timeline` (a Gantt chart): in the terminal, as SVG, and as HTML page.

The page is one HTML file that needs no other file and no network. In the terminal, each lane is a
row. If the bars would be too narrow for their labels, the time axis continues in a further band of
rows below:

    0 ─────────────── 8            0 ──── 4
    rank 0 │0 1 2 0 1 2 │          rank 0 │0 1 2│
    rank 1 │  0 0 1 1 2 2│         ...
                                   4 ──── 8
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from statistics import median_low
from string import Template
from types import MappingProxyType

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from sbp_core.timeline import Bar, Lane, Timeline

__all__ = ["ENDINGS", "page", "show", "svg", "terminal_lines", "write_drawings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The style of the bars of one kind.

    Args:
        fill: Colour of the bar, `#rrggbb`.
        ink: Colour of the label on it, with a contrast of at least 4.5.
        name: Name in the legend.
    """

    fill: str
    ink: str
    name: str


_DARK, _LIGHT = "#10202e", "#ffffff"

_KNOWN: Mapping[str, Look] = MappingProxyType(
    {
        "F": Look(fill="#2f6db0", ink=_LIGHT, name="forward"),
        "B": Look(fill="#f2994a", ink=_DARK, name="backward"),
        "I": Look(fill="#f2c14e", ink=_DARK, name="input gradient"),
        "W": Look(fill="#5fb58c", ink=_DARK, name="weight gradient"),
        # Kinds in timelines of plans: always in the same colours.
        "update": Look(fill="#f4a6a6", ink=_DARK, name="update"),
        "collective": Look(fill="#8ecae6", ink=_DARK, name="collective"),
        "transfer": Look(fill="#c9a7eb", ink=_DARK, name="transfer"),
    }
)

#: Colours of other kinds, in the order of their first bars.
_FILLS = ("#b5c99a", "#d9d9d9", "#8fb8a8", "#d8a48f", "#e9c46a", "#a3a1d6")

_FADING = 0.22
"""So much closer to white each further chunk of a rank is drawn."""


def looks_of(kinds: Sequence[str]) -> Mapping[str, Look]:
    """Return the style of each kind."""
    others = [kind for kind in kinds if kind not in _KNOWN]
    return {
        kind: _KNOWN[kind]
        if kind in _KNOWN
        else Look(fill=_FILLS[others.index(kind) % len(_FILLS)], ink=_DARK, name=kind)
        for kind in kinds
    }


def fade(look: Look, chunk: int) -> Look:
    """Return the style for a further chunk (model part) of a rank: paler, of the same hue."""
    share = min(chunk, 3) * _FADING
    if not share:
        return look
    parts = [int(look.fill[at : at + 2], 16) for at in (1, 3, 5)]
    pale = "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
    return Look(fill=f"#{pale}", ink=_DARK, name=look.name)


def short(number: float) -> str:
    """Return a time with at most six significant digits: 24, 4.5, 0.0313."""
    return f"{number:.6g}"


_ROW, _GAP = 26, 6
_LETTER = 6.6
"""Width of a letter of 11 pixels, in pixels."""
_BELOW = 58
"""Room for the axis and the legend."""
_LEAST_WIDTH, _MOST_WIDTH = 640, 20_000
"""Of the drawing, in pixels."""


def svg(timeline: Timeline) -> str:
    """Draw a timeline; the text has the text colour of the surrounding page.

    Returns:
        An `<svg>` element, which is also valid as a file.
    """
    looks = looks_of(timeline.kinds)
    margin = 16 + _LETTER * max((len(lane.name) for lane in timeline.lanes), default=0)
    pixels_per_s = _pixels_per_s(timeline)
    length = timeline.end_s * pixels_per_s
    height = len(timeline.lanes) * (_ROW + _GAP)
    legend, legend_width, y = [], margin, height + 48
    for look in looks.values():
        legend.append(
            f'<rect x="{legend_width:.1f}" y="{y - 10}" width="12" height="12" fill="{look.fill}"/>'
            f'<text x="{legend_width + 17:.1f}" y="{y}">{escape(look.name)}</text>'
        )
        legend_width += 17 + _LETTER * len(look.name) + 18
    width = max(margin + length + 60, legend_width, _LEAST_WIDTH)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{height + _BELOW}" viewBox="0 0 {width:.0f} {height + _BELOW}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor" role="img">',
        f"<title>{escape(timeline.title)}</title>",
        *_svg_axis(timeline, margin, pixels_per_s, height),
    ]
    for row, lane in enumerate(timeline.lanes):
        top = row * (_ROW + _GAP)
        parts.append(
            f'<text x="{margin - 8:.1f}" y="{top + 17}" text-anchor="end">'
            f"{escape(lane.name)}</text>"
        )
        for bar in lane.bars:
            look, left = fade(looks[bar.kind], bar.chunk), margin + bar.start_s * pixels_per_s
            size = (bar.end_s - bar.start_s) * pixels_per_s
            span = f"{short(bar.start_s)} to {short(bar.end_s)} {timeline.unit}"
            label = ""
            if size >= _LETTER * len(bar.label):
                label = (
                    f'<text x="{left + size / 2:.2f}" y="{top + 17}" text-anchor="middle" '
                    f'fill="{look.ink}">{escape(bar.label)}</text>'
                )
            parts.append(
                f"<g><title>{escape(f'{bar.detail or look.name}: {span}'.strip())}</title>"
                f'<rect x="{left:.2f}" y="{top}" width="{size:.2f}" height="{_ROW}" '
                f'fill="{look.fill}" stroke="#ffffff" stroke-width="0.6"/>{label}</g>'
            )
    return "\n".join([*parts, *legend, "</svg>\n"])


def _pixels_per_s(timeline: Timeline) -> float:
    """Return the pixels per second: enough for the labels of short bars, unless it is too wide."""
    if not timeline.end_s:
        return 1.0
    labelled = (
        bar for lane in timeline.lanes for bar in lane.bars if bar.label and bar.end_s > bar.start_s
    )
    needed = max(
        ((_LETTER * len(bar.label) + 6) / (bar.end_s - bar.start_s) for bar in labelled),
        default=0.0,
    )
    least, most = (pixels / timeline.end_s for pixels in (_LEAST_WIDTH, _MOST_WIDTH))
    return min(max(needed, least), most)


def _svg_axis(timeline: Timeline, margin: float, pixels_per_s: float, height: int) -> list[str]:
    """Draw a line for each round time, at least 70 pixels apart."""
    if not timeline.end_s:
        return []
    power = 10.0 ** floor(log10(70 / pixels_per_s))
    step = next(power * one for one in (1, 2, 5, 10) if power * one * pixels_per_s >= 70)
    lines = []
    for number in range(floor(timeline.end_s / step + 1e-9) + 1):
        x = margin + number * step * pixels_per_s
        lines.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height}" stroke="currentColor" '
            'stroke-opacity="0.2"/>'
        )
        named = f"{short(number * step)} {timeline.unit}".strip()
        lines.append(
            f'<text x="{x:.2f}" y="{height + 14}" text-anchor="middle" '
            f'fill-opacity="0.7">{named}</text>'
        )
    return lines


_MOST_BANDS = 12
"""A picture of more bands than this is drawn with bars that are too narrow for some labels."""


def terminal_lines(timeline: Timeline, *, width: int, coloured: bool) -> list[Text]:
    """Draw a timeline as text.

    Args:
        timeline: The timeline.
        width: Columns of the terminal, at least 20.
        coloured: Whether kinds are shown by colours; otherwise by the first letter of their names.

    Returns:
        Lines of at most `width` columns; none for a timeline without bars.
    """
    bars = [bar for lane in timeline.lanes for bar in lane.bars]
    if not timeline.end_s:
        return []
    looks = looks_of(timeline.kinds)
    margin = min(max(cell_len(lane.name) for lane in timeline.lanes), width // 3)
    columns = max(8, width - margin - 2)
    columns_per_s, columns = _columns_per_s(bars, timeline.end_s, columns, named=not coloured)
    total = ceil(timeline.end_s * columns_per_s - 1e-9)
    num_bands = ceil(total / columns)
    rows = [
        _terminal_row(lane, looks, columns_per_s, total, coloured=coloured)
        for lane in timeline.lanes
    ]
    lines: list[Text] = []
    for band in range(num_bands):
        first, last = band * columns, min(total, (band + 1) * columns)
        left = f"{short(first / columns_per_s)} "
        right = f" {short(last / columns_per_s)} {timeline.unit}".rstrip()
        line = "─" * max(0, last - first - len(left) - len(right))
        lines.append(Text(f"{'':<{margin}}  {left}{line}{right}", style="dim"))
        for lane, row in zip(timeline.lanes, rows, strict=True):
            name = lane.name if cell_len(lane.name) <= margin else f"{lane.name[: margin - 1]}…"
            lines.append(Text(f"{name:<{margin}} │") + row[first:last])
    legend = Text()
    for kind, look in looks.items():
        style = Style(color=look.ink, bgcolor=look.fill) if coloured else Style()
        legend.append(f" {kind[:1]} " if coloured else kind[:1], style)
        legend.append(f" {look.name}  ")
    legend.rstrip()
    if any(bar.chunk for bar in bars):
        legend.append("  paler: further chunks" if coloured else "  lower case: further chunks")
    return [*lines, legend]


def _columns_per_s(
    bars: Sequence[Bar], end_s: float, columns: int, *, named: bool
) -> tuple[float, int]:
    """Return the columns per second, and the columns of a band.

    A short bar gets a whole number of columns, enough for its label, and a band has whole bars. If
    that would take too many bands, labels are cut.
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


def _terminal_row(
    lane: Lane, looks: Mapping[str, Look], columns_per_s: float, total: int, *, coloured: bool
) -> Text:
    """Draw one lane as a single line; bands are slices of it."""
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
        look = fade(looks[bar.kind], bar.chunk)
        style = Style(color=look.ink, bgcolor=look.fill) if coloured else Style()
        row.append(f"{label:{fill}<{last - first}}", style)
    row.append(" " * (total - len(row)))
    return row


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b2733; --line: #d5dbe1; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14191f; --ink: #e4e9ee; --line: #38424d; }
}
body { margin: 2rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; font-weight: 600; }
table { border-collapse: collapse; margin: 1rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.5rem .25rem 0; border-bottom: 1px solid var(--line);
  text-align: left; font-weight: normal; vertical-align: top; }
th { opacity: .75; white-space: nowrap; }
.timeline { overflow-x: auto; padding-bottom: .5rem; }
</style>
</head>
<body>
<h1>$title</h1>
<table>
$facts
</table>
<div class="timeline">
$drawing
</div>
</body>
</html>
""")


def page(timeline: Timeline, facts: Mapping[str, str]) -> str:
    """Return an HTML page with a title, a table of facts, and the timeline, scrollable if wide."""
    rows = (
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return _PAGE.substitute(
        title=escape(timeline.title), facts="\n".join(rows), drawing=svg(timeline)
    )


#: File endings of the drawings of a timeline.
ENDINGS = (".svg", ".html")


def show(timeline: Timeline, console: Console) -> None:
    """Draw a timeline in the terminal: with colours, or with letters if it has no colours."""
    coloured = console.is_terminal and console.color_system is not None
    for line in terminal_lines(timeline, width=console.width, coloured=coloured):
        if coloured:
            console.print(line, no_wrap=True, crop=False)
        else:
            sys.stdout.write(f"{line.plain.rstrip()}\n")


def write_drawings(timeline: Timeline, facts: Mapping[str, str], out: str) -> None:
    """Write a timeline as SVG, and as a page with some facts; print a message for each."""
    drawings = zip(ENDINGS, (svg(timeline), page(timeline, facts)), strict=True)
    for ending, drawing in drawings:
        Path(out + ending).write_text(drawing, encoding="utf-8")
        sys.stdout.write(f"wrote {out}{ending}\n")
