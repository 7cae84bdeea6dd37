"""A timeline drawn as SVG: a row a lane, with labels, an axis and a legend."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import floor, log10

from sbp_core.timeline import Bar, Timeline
from sbp_launch.timelines.style import Look, faded, looks_of, short

_ROW, _GAP = 26, 6
_LETTER = 6.6
"""Width of a letter of 11 pixels, in pixels."""
_BELOW = 58
"""Room for the axis and the legend."""
_LEAST_WIDTH, _MOST_WIDTH = 640, 20_000
"""Of the drawing, in pixels."""


def svg(timeline: Timeline) -> str:
    """Draw a timeline; colours of the text follow the page that it stands in.

    Returns:
        An `<svg>` element, which is a file of its own, too.
    """
    looks = looks_of(timeline.kinds)
    margin = 16 + _LETTER * max((len(lane.name) for lane in timeline.lanes), default=0)
    pixels_per_s = _scale(timeline)
    length = timeline.end_s * pixels_per_s
    height = len(timeline.lanes) * (_ROW + _GAP)
    legend, legend_width = _legend(looks, margin, height + 48)
    width = max(margin + length + 60, legend_width, _LEAST_WIDTH)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{height + _BELOW}" viewBox="0 0 {width:.0f} {height + _BELOW}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor" role="img">',
        f"<title>{escape(timeline.title)}</title>",
        *_axis(timeline, margin, pixels_per_s, height),
    ]
    for row, lane in enumerate(timeline.lanes):
        top = row * (_ROW + _GAP)
        parts.append(
            f'<text x="{margin - 8:.1f}" y="{top + 17}" text-anchor="end">'
            f"{escape(lane.name)}</text>"
        )
        parts += [
            _bar(bar, faded(looks[bar.kind], bar.chunk), margin, pixels_per_s, top, timeline.unit)
            for bar in lane.bars
        ]
    return "\n".join([*parts, *legend, "</svg>\n"])


def _scale(timeline: Timeline) -> float:
    """Return the pixels a second: shortest bars show their labels, if the drawing stays small."""
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


def _bar(bar: Bar, look: Look, margin: float, pixels_per_s: float, top: int, unit: str) -> str:
    left = margin + bar.start_s * pixels_per_s
    width = (bar.end_s - bar.start_s) * pixels_per_s
    told = f"{bar.detail or look.name}: {short(bar.start_s)} to {short(bar.end_s)} {unit}".strip()
    label = ""
    if width >= _LETTER * len(bar.label):
        label = (
            f'<text x="{left + width / 2:.2f}" y="{top + 17}" text-anchor="middle" '
            f'fill="{look.ink}">{escape(bar.label)}</text>'
        )
    return (
        f'<g><title>{escape(told)}</title><rect x="{left:.2f}" y="{top}" width="{width:.2f}" '
        f'height="{_ROW}" fill="{look.fill}" stroke="#ffffff" stroke-width="0.6"/>{label}</g>'
    )


def _axis(timeline: Timeline, margin: float, pixels_per_s: float, height: int) -> list[str]:
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


def _legend(looks: Mapping[str, Look], margin: float, y: int) -> tuple[list[str], float]:
    """Draw what the colours mean; return that, and where it ends."""
    parts, x = [], margin
    for look in looks.values():
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 10}" width="12" height="12" fill="{look.fill}"/>'
            f'<text x="{x + 17:.1f}" y="{y}">{escape(look.name)}</text>'
        )
        x += 17 + _LETTER * len(look.name) + 18
    return parts, x
