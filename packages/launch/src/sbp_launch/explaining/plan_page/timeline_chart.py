"""The simulated step on a page: lanes of ranks whose width follows that of the page.

Positions are shares of the step, so that a script enlarges the drawing by its width alone; each bar
is an inner `svg`, which cuts off a label that is too long for it.
"""

from __future__ import annotations

from html import escape

from sbp_core.timeline import Bar, Timeline
from sbp_core.units import format_seconds
from sbp_launch.explaining.plan_page.colours import legend
from sbp_launch.explaining.plan_page.ticks import round_ticks
from sbp_launch.timelines.style import Look, faded, looks_of

_ROW, _GAP, _AXIS = 24, 6, 22

#: Bars of a smaller share of the step have no border.
_THIN = 0.003


def timeline_chart(timeline: Timeline) -> str:
    """Return a timeline, whose unit is the second, with its legend."""
    looks = looks_of(timeline.kinds)
    names = "".join(f"<li>{escape(lane.name)}</li>" for lane in timeline.lanes)
    height = len(timeline.lanes) * (_ROW + _GAP)
    parts: list[str] = []
    few = round_ticks(timeline.end_s, 8)
    many = [time_s for time_s in round_ticks(timeline.end_s, 60) if time_s not in few]
    parts += [_tick(time_s, timeline.end_s, height, "") for time_s in few]
    parts += [_tick(time_s, timeline.end_s, height, " fine") for time_s in many]
    for row, lane in enumerate(timeline.lanes):
        top = row * (_ROW + _GAP) + _GAP // 2
        parts += [
            _bar(bar, faded(looks[bar.kind], bar.chunk), timeline.end_s, top) for bar in lane.bars
        ]
    told = legend({look.name: look.fill for look in looks.values()})
    if any(bar.label for lane in timeline.lanes for bar in lane.bars):
        told += "<p><small>The number in a bar is that of its micro-batch.</small></p>"
    return (
        f'<div class="lanes"><ul class="lane-names">{names}</ul>'
        '<div class="scroll" tabindex="0" role="region" aria-label="timeline">'
        f'<svg class="timeline" width="100%" height="{height + _AXIS}" role="img" '
        f'aria-label="{escape(timeline.title)}">{"".join(parts)}</svg></div></div>{told}'
    )


def _tick(time_s: float, end_s: float, height: int, also: str) -> str:
    """Return a line at a time, and the time below it.

    Args:
        time_s: Which.
        end_s: Of the step.
        height: Of the lanes, in pixels.
        also: Classes beside its own; ` fine` shows it where the drawing is enlarged.
    """
    at = _percent(time_s, end_s)
    return (
        f'<line class="grid{also}" x1="{at}" x2="{at}" y1="0" y2="{height}"/>'
        f'<text class="tick{also}" x="{at}" y="{height + 15}" text-anchor="start">'
        f"{format_seconds(time_s) if time_s else 0}</text>"
    )


def _bar(bar: Bar, look: Look, end_s: float, top: int) -> str:
    told = (
        f"{bar.detail or look.name}: {format_seconds(bar.start_s)} to {format_seconds(bar.end_s)}"
    )
    label = ""
    if bar.label:
        label = f'<text x="50%" y="16" text-anchor="middle" fill="{look.ink}">{bar.label}</text>'
    # Beside each other, thin bars would be nothing but borders.
    border = "" if bar.end_s - bar.start_s < _THIN * end_s else ' class="apart"'
    return (
        f'<svg x="{_percent(bar.start_s, end_s)}" y="{top}" '
        f'width="{_percent(bar.end_s - bar.start_s, end_s)}" height="{_ROW}">'
        f"<title>{escape(told)}</title>"
        f'<rect width="100%" height="100%" fill="{look.fill}"{border}/>{label}</svg>'
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.3f}%"
