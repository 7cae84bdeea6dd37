"""Charts on the HTML page of a plan: memory of a rank over time, and timeline of the step.

Memory: areas of the kinds on top of each other, and the limit. `sbp_core.memory` gives the live
bytes at each instruction, `sbp_core.simulation` the time of each firing (one run of a segment of
operators); all instructions of a firing are assumed to take equally long.

Timeline: lanes of ranks, as wide as the page. Positions are percentages of the step, so a script
can zoom by changing the width. Each bar is an inner `svg`, which clips a label that is too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from math import floor, log10

from sbp_core.memory import MemoryKind, MemoryProfile
from sbp_core.simulation import Simulation
from sbp_core.timeline import Bar, Timeline
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.page_model import MEMORY, legend
from sbp_launch.explaining.timelines import Look, fade, looks_of


def round_ticks(end: float, most: int) -> list[float]:
    """Return 0 and further round numbers below `end`, at equal distances.

    Args:
        end: End of the axis, >= 0.
        most: Largest number of ticks in addition to 0, >= 2.
    """
    if end <= 0:
        return [0.0]
    power = 10.0 ** floor(log10(end / most))
    step = next(power * one for one in (1, 2, 5, 10) if power * one * most >= end * (1 - 1e-9))
    # A tick at the very end would have its label outside of the drawing.
    return [step * number for number in range(floor(0.95 * end / step + 1e-9) + 1)]


#: Largest number of points in time that are drawn.
_MOST_MOMENTS = 400

#: Size of the drawing, in its own units.
_WIDTH, _HEIGHT = 1000, 200

#: A limit of more than this many times the peak is given in the caption, but not drawn.
_MOST_LIMIT = 2.5


def memory_chart(
    profile: MemoryProfile, simulation: Simulation, limit_bytes: int, name: str
) -> str:
    """Return a chart of a rank's memory with a caption, as HTML.

    Args:
        profile: Memory profile of the rank.
        simulation: The simulated step, with the times of firings.
        limit_bytes: Memory limit of the rank.
        name: Title: the ranks that this rank represents.
    """
    times_s = tick_times_s(profile, simulation)
    total = profile.total
    peak = max(total)
    at = total.index(peak)
    draws_limit = limit_bytes <= _MOST_LIMIT * peak
    top = 1.08 * max(peak, limit_bytes if draws_limit else 0)
    moments = peaks_of(times_s, total, simulation.step_s)
    parts = [
        f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>'
        for y in (_y(size, top) for size in round_ticks(top, 4))
    ]
    parts += [*_areas(profile, times_s, moments, simulation.step_s, top)]
    axis = "".join(
        f'<span style="left:{_percent(time_s, simulation.step_s, 2)}">'
        f"{format_seconds(time_s) if time_s else 0}</span>"
        for time_s in round_ticks(simulation.step_s, 8)
    )
    if draws_limit:
        y = _y(limit_bytes, top)
        parts.append(f'<line class="limit" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
    actor, firing, node = profile.ticks[at]
    where = f"in firing {firing} of {actor}, at {node}" if actor else "before the step begins"
    limit = format_bytes(limit_bytes)
    share = 100 * peak / limit_bytes
    marks = [
        f'<span class="y" style="bottom:{100 * size / top:.2f}%">{format_bytes(size)}</span>'
        for size in round_ticks(top, 4)
        if size
    ]
    marks.append(
        f'<span class="peak" style="left:{_percent(times_s[at], simulation.step_s, 2)};'
        f'bottom:{100 * peak / top:.2f}%" '
        f'title="peak: {escape(where)}"></span>'
    )
    if draws_limit:
        marks.append(
            f'<span class="limit" style="bottom:{100 * limit_bytes / top:.2f}%">limit {limit}'
            "</span>"
        )
    return (
        f'<figure class="memory"><figcaption><b>{escape(name)}</b>: peak '
        f"{format_bytes(peak)} at {format_seconds(times_s[at])}, {escape(where)}; "
        f"{share:.3g}% of the limit, {limit}</figcaption>"
        f'<div class="plot"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="memory over time">{"".join(parts)}</svg>{"".join(marks)}</div>'
        f'<div class="x">{axis}</div></figure>'
    )


def memory_legend(profiles: Sequence[MemoryProfile]) -> str:
    """Return the legend of the kinds of memory that occur."""
    kinds = [kind for kind in MemoryKind if any(any(p.kinds.get(kind, ())) for p in profiles)]
    return legend({kind.value: MEMORY[kind] for kind in kinds})


def tick_times_s(profile: MemoryProfile, simulation: Simulation) -> list[float]:
    """Return the time of each tick of a rank's memory profile, in seconds, monotonic.

    The order of ticks is one of several possible orders. If the simulation runs firings of several
    threads in another order, a tick is drawn no earlier than the tick before it.
    """
    spans = {
        (one.actor.name, one.index): (one.start_s, one.free_s)
        for one in simulation.firings
        if one.rank == profile.rank
    }
    counts = Counter((actor, index) for actor, index, _ in profile.ticks)
    seen: Counter[tuple[str, int]] = Counter()
    found = []
    for actor, index, _ in profile.ticks:
        key = actor, index
        start_s, free_s = spans.get(key, (0.0, 0.0))
        found.append(start_s + (free_s - start_s) * seen[key] / counts[key])
        seen[key] += 1
    return list(accumulate(found, max))


def peaks_of(times_s: Sequence[float], total: Sequence[int], end_s: float) -> list[int]:
    """Return the ticks to draw, in order: of ticks that are too close, the one with most memory."""
    fullest: dict[int, int] = {}
    for tick, time_s in enumerate(times_s):
        part = min(_MOST_MOMENTS - 1, int(_MOST_MOMENTS * time_s / end_s)) if end_s else 0
        if part not in fullest or total[tick] > total[fullest[part]]:
            fullest[part] = tick
    return [fullest[part] for part in sorted(fullest)]


def _areas(
    profile: MemoryProfile,
    times_s: Sequence[float],
    moments: Sequence[int],
    end_s: float,
    top: float,
) -> Iterator[str]:
    """Yield a polygon for each kind, on top of the kinds before it."""
    below = [0] * len(moments)
    xs = [_WIDTH * times_s[tick] / end_s if end_s else 0.0 for tick in moments]
    # The curve is a step function: each value holds until the next tick.
    xs[0] = 0.0
    ends = [*xs[1:], float(_WIDTH)]
    # From the bottom up: permanent kinds first, temporary ones last.
    for kind in MEMORY:
        sizes = profile.kinds.get(kind)
        if sizes is None:
            continue
        above = [low + sizes[tick] for low, tick in zip(below, moments, strict=True)]
        if above == below:
            continue
        upper = " ".join(
            f"{x:.1f},{_y(size, top)} {end:.1f},{_y(size, top)}"
            for x, end, size in zip(xs, ends, above, strict=True)
        )
        lower = " ".join(
            f"{end:.1f},{_y(size, top)} {x:.1f},{_y(size, top)}"
            for x, end, size in reversed(list(zip(xs, ends, below, strict=True)))
        )
        yield (
            f'<polygon fill="{MEMORY[kind]}" points="{upper} {lower}"><title>{kind.value}</title>'
            "</polygon>"
        )
        below = above


def _y(size: float, top: float) -> str:
    return f"{_HEIGHT * (1 - size / top) if top else _HEIGHT:.1f}"


_ROW, _GAP, _AXIS = 24, 6, 22

#: Bars narrower than this fraction of the step have no border.
_THIN = 0.003


def timeline_chart(timeline: Timeline) -> str:
    """Return the chart of a timeline in seconds, with its legend, as HTML."""
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
            _bar(bar, fade(looks[bar.kind], bar.chunk), timeline.end_s, top) for bar in lane.bars
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
    """Return a line and a label at a time; `also` is a class, such as ` fine` for zoomed views."""
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
    # Adjacent thin bars would consist of borders only.
    border = "" if bar.end_s - bar.start_s < _THIN * end_s else ' class="apart"'
    return (
        f'<svg x="{_percent(bar.start_s, end_s)}" y="{top}" '
        f'width="{_percent(bar.end_s - bar.start_s, end_s)}" height="{_ROW}">'
        f"<title>{escape(told)}</title>"
        f'<rect width="100%" height="100%" fill="{look.fill}"{border}/>{label}</svg>'
    )


def _percent(part: float, whole: float, digits: int = 3) -> str:
    return f"{100 * part / whole if whole else 0:.{digits}f}%"
