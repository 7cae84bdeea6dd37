"""The memory of a rank over the simulated step: kinds on top of each other, and the limit.

`sbp_core.memory` knows what is alive at each instruction, `sbp_core.simulate` when each firing is:
the instructions of a firing are taken to be equally long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate

from sbp_core.memory import MemoryKind, MemoryProfile
from sbp_core.simulate import Simulation
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.plan_page.colours import MEMORY, legend
from sbp_launch.explaining.plan_page.ticks import round_ticks

#: Moments that are drawn of a step.
_MOST_MOMENTS = 400

#: Of the drawing, in units of its own.
_WIDTH, _HEIGHT = 1000, 200

#: A limit of more than this many times the peak is told, and not drawn.
_MOST_LIMIT = 2.5


def memory_chart(
    profile: MemoryProfile, simulation: Simulation, limit_bytes: int, name: str
) -> str:
    """Return the memory of a rank as a drawing with a caption.

    Args:
        profile: Of the rank.
        simulation: When its firings are.
        limit_bytes: What it has.
        name: What the rank stands for.
    """
    times_s = tick_times_s(profile, simulation)
    total = profile.total
    peak = max(total)
    at = total.index(peak)
    draws_limit = limit_bytes <= _MOST_LIMIT * peak
    top = 1.08 * max(peak, limit_bytes if draws_limit else 0)
    moments = peaks_of(times_s, total, simulation.step_s)
    parts = [*_grid(top), *_areas(profile, times_s, moments, simulation.step_s, top)]
    if draws_limit:
        y = _y(limit_bytes, top)
        parts.append(f'<line class="limit" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
    actor, firing, node = profile.ticks[at]
    where = f"in firing {firing} of {actor}, at {node}" if actor else "before the step begins"
    limit = format_bytes(limit_bytes)
    share = 100 * peak / limit_bytes
    left = 100 * times_s[at] / simulation.step_s if simulation.step_s else 0.0
    marks = [
        f'<span class="y" style="bottom:{100 * size / top:.2f}%">{format_bytes(size)}</span>'
        for size in round_ticks(top, 4)
        if size
    ]
    marks.append(
        f'<span class="peak" style="left:{left:.2f}%;bottom:{100 * peak / top:.2f}%" '
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
        f"{_time_axis(simulation.step_s)}</figure>"
    )


def memory_legend(profiles: Sequence[MemoryProfile]) -> str:
    """Return what the colours of memory mean, of kinds that are there."""
    kinds = [kind for kind in MemoryKind if any(any(p.kinds.get(kind, ())) for p in profiles)]
    return legend({kind.value: MEMORY[kind] for kind in kinds})


def tick_times_s(profile: MemoryProfile, simulation: Simulation) -> list[float]:
    """Return when each tick of a rank's memory is, in seconds, never going back.

    The order of ticks is one of those that are possible; where firings of several threads are
    simulated in another one, a tick is drawn no earlier than the one before it.
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
    """Return the ticks that are drawn, in order: of moments that are too near, the fullest one.

    Args:
        times_s: When each tick is.
        total: Bytes alive at each.
        end_s: When the step is over.
    """
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
    """Yield an area for each kind, on top of those before it."""
    below = [0] * len(moments)
    xs = [_WIDTH * times_s[tick] / end_s if end_s else 0.0 for tick in moments]
    # What is held at a moment is held until the next one; the first begins with the step.
    xs[0] = 0.0
    ends = [*xs[1:], float(_WIDTH)]
    for kind, sizes in _kinds(profile):
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


def _kinds(profile: MemoryProfile) -> Iterator[tuple[MemoryKind, Sequence[int]]]:
    """Yield kinds from the bottom up: what is always there first, what comes and goes last."""
    kinds: Mapping[MemoryKind, Sequence[int]] = profile.kinds
    for kind in MEMORY:
        if kind in kinds:
            yield kind, kinds[kind]


def _grid(top: float) -> Iterator[str]:
    for size in round_ticks(top, 4):
        y = _y(size, top)
        yield f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>'


def _time_axis(end_s: float) -> str:
    marks = "".join(
        f'<span style="left:{100 * time_s / end_s if end_s else 0:.2f}%">'
        f"{format_seconds(time_s) if time_s else 0}</span>"
        for time_s in round_ticks(end_s, 8)
    )
    return f'<div class="x">{marks}</div>'


def _y(size: float, top: float) -> str:
    return f"{_HEIGHT * (1 - size / top) if top else _HEIGHT:.1f}"
