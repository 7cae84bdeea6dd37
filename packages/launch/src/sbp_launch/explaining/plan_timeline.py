"""Turn the simulated step of a plan into a Gantt chart: bars of compute and boxing, by rank.

    rank 0        │F0 F1 F2 ·B0 F3 B1 ...
    ranks 1 and 2 │   F0 B0 F1 B1 ...

`sbp-plan` draws it (`draw`, `plan_page`). Boxing is communication that changes the layout of a
tensor. Ranks with the same times share a lane. The work of a rank on one micro-batch without a
pause is one bar. In large plans, bars that are too short to be visible are merged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sbp_core.compile import (
    FETCH_THREAD,
    STORE_THREAD,
    Actor,
    BoxingActor,
    Collective,
    PhysicalPlan,
)
from sbp_core.graph import Phase, Rate
from sbp_core.simulation import Simulation
from sbp_core.timeline import Bar, Lane, Timeline
from sbp_core.units import format_ranges, format_seconds
from sbp_launch.planning.flow import Planned

#: Numbers of bars and lanes of a page that a browser opens quickly.
_MOST_BARS, _MOST_LANES = 20_000, 128

#: The largest number of waits of a critical cycle that are listed.
_MOST_WAITS = 8

#: If there are too many bars, those shorter than this part of a step are merged first.
_PARTS = 4_000

#: Times that differ by less are equal, in seconds: a rounding error.
_SAME_S = 1e-12

#: The text between the first and the last firing of a bar.
_TO = " … "

_COMPUTE = {
    Phase.FORWARD: "F",
    Phase.BACKWARD: "B",
    Phase.WEIGHT_GRADIENT: "W",
    Phase.OPTIMIZER: "update",
}


def plan_timeline(plan: PhysicalPlan, simulation: Simulation, title: str) -> Timeline:
    """Return the simulated step of a plan, with a lane for each set of ranks with the same times.

    Boxing that continues while its thread is free has a lane of its own, for links. All lanes and
    bars are included: `coarse` reduces a large timeline.
    """
    kinds = _Kinds(plan)
    lanes: dict[tuple[int, str], list[Bar]] = defaultdict(list)
    for firing in simulation.firings:
        thread = firing.actor.thread
        if firing.free_s > firing.start_s:
            bar = kinds.bar(firing.rank, firing.actor, firing.index, firing.start_s, firing.free_s)
            lanes[firing.rank, thread].append(bar)
        if firing.end_s > firing.free_s:
            ahead = lanes[firing.rank, f"{thread} links"]
            # A message on a link waits for the earlier messages there.
            begin_s = max(firing.free_s, ahead[-1].end_s if ahead else 0.0)
            begin_s = min(begin_s, firing.end_s)
            ahead.append(kinds.bar(firing.rank, firing.actor, firing.index, begin_s, firing.end_s))
    ranks: dict[tuple[object, ...], list[int]] = defaultdict(list)
    found: dict[tuple[object, ...], tuple[Bar, ...]] = {}
    for (rank, name), bars in sorted(lanes.items()):
        joined = tuple(_join_bars(bars, 0.0))
        key = (name, *((bar.kind, bar.label, bar.chunk, _rounded_times(bar)) for bar in joined))
        ranks[key].append(rank)
        found[key] = joined
    names = {name for _, name in lanes}
    return Timeline(
        title=title,
        lanes=tuple(
            Lane(
                name=f"{'rank' if len(of) == 1 else 'ranks'} {format_ranges(of)}"
                + f" {key[0]}" * (len(names) > 1),
                bars=found[key],
            )
            for key, of in ranks.items()
        ),
    )


def coarse(
    timeline: Timeline, num_bars: int = _MOST_BARS, num_lanes: int = _MOST_LANES
) -> tuple[Timeline, list[str]]:
    """Return a timeline with few enough bars and lanes, and lines that describe the reduction.

    Args:
        timeline: A timeline of any size.
        num_bars: The largest number of bars of the result, but at least one for each lane.
        num_lanes: The largest number of lanes of the result.
    """
    said = []
    lanes = timeline.lanes[:num_lanes]
    if left := len(timeline.lanes) - len(lanes):
        said.append(f"the first {len(lanes)} lanes are drawn, and {left} are not")
    least_s, kept = 0.0, lanes
    while sum(len(lane.bars) for lane in kept) > max(num_bars, len(lanes)):
        if least_s > timeline.end_s:
            break
        least_s = 2 * least_s or timeline.end_s / _PARTS
        kept = tuple(replace(lane, bars=tuple(_join_bars(lane.bars, least_s))) for lane in lanes)
    if least_s:
        said.append(
            f"bars and gaps below {format_seconds(least_s)} are drawn as part of what is next to "
            "them"
        )
    return replace(timeline, lanes=kept), said


def timeline_facts(planned: Planned) -> dict[str, str]:
    """Return facts to show above a timeline: times, shares of ranks, and the critical cycle."""
    checked, simulation = planned.checked, planned.simulation
    facts = {
        "predicted time of a step": format_seconds(simulation.step_s),
        "period": f"{format_seconds(checked.period_s)} from step to step, if they follow "
        "without a pause",
        **_shares(planned.plan, simulation),
    }
    if cycle := checked.critical_cycle:
        more = [f"and {len(cycle) - _MOST_WAITS} more"] * (len(cycle) > _MOST_WAITS)
        facts["critical cycle"] = "; ".join([*cycle[:_MOST_WAITS], *more])
    return facts


def _shares(plan: PhysicalPlan, simulation: Simulation) -> dict[str, str]:
    """Return the shares of the step in which ranks compute, box and idle: mean and maximum."""
    if not simulation.step_s:
        return {}
    computing = dict.fromkeys((part.rank for part in plan.ranks), 0.0)
    boxing, copying = dict(computing), dict(computing)
    for one in simulation.firings:
        to = boxing if isinstance(one.actor, BoxingActor) else computing
        if one.actor.thread in (FETCH_THREAD, STORE_THREAD):
            to = copying
        to[one.rank] += one.free_s - one.start_s
    # A rank with several threads may compute and box at the same time.
    idle = {
        rank: max(0.0, simulation.step_s - computing[rank] - boxing[rank]) for rank in computing
    }
    named = {"computing": computing, "boxing": boxing, "bubble (idle)": idle}
    if any(copying.values()):
        named["copying from and to the host"] = copying
    facts = {}
    for name, of in named.items():
        mean, most = sum(of.values()) / len(of), max(of, key=lambda rank: of[rank])
        facts[name] = (
            f"{100 * mean / simulation.step_s:.3g} % of the step, "
            f"at most {100 * of[most] / simulation.step_s:.3g} % (rank {most})"
        )
    return facts


class _Kinds:
    """Makes the bars of a plan's firings."""

    def __init__(self, plan: PhysicalPlan) -> None:
        self.plan = plan
        stages: dict[int, set[int]] = defaultdict(set)
        #: Pairs of rank and stage whose weight gradients are separate actors.
        self.parted: set[tuple[int, int]] = set()
        for part in plan.ranks:
            for actor in part.actors:
                stages[part.rank].add(actor.stage)
                if actor.phase is Phase.WEIGHT_GRADIENT:
                    self.parted.add((part.rank, actor.stage))
        self.chunks = {
            (rank, stage): chunk
            for rank, held in stages.items()
            for chunk, stage in enumerate(sorted(held))
        }

    def bar(self, rank: int, actor: Actor, index: int, start_s: float, end_s: float) -> Bar:
        """Return the bar of a firing."""
        micro_batch = index if actor.rate is Rate.MICRO else None
        detail = actor.name if micro_batch is None else f"{actor.name}, micro-batch {micro_batch}"
        if isinstance(actor, BoxingActor):
            kind = "collective" if isinstance(actor, Collective) else "transfer"
            return Bar(label="", kind=kind, start_s=start_s, end_s=end_s, detail=detail)
        kind = _COMPUTE[actor.phase]
        if kind == "B" and (rank, actor.stage) in self.parted:
            kind = "I"
        return Bar(
            label="" if micro_batch is None else str(micro_batch),
            kind=kind,
            start_s=start_s,
            end_s=end_s,
            micro_batch=micro_batch,
            chunk=self.chunks[rank, actor.stage] if micro_batch is not None else 0,
            detail=f"{detail} of stage {actor.stage}",
        )


def _join_bars(bars: Iterable[Bar], least_s: float) -> Sequence[Bar]:
    """Return bars, with adjacent ones without a gap merged if they look alike.

    Bars shorter than `least_s` are merged, too, until they are that long together; the result looks
    like the longest of them.
    """
    made: list[Bar] = []
    for bar in bars:
        made.append(bar)
        while len(made) > 1 and _joins(made[-2], made[-1], least_s):
            after, before = made.pop(), made.pop()
            longer = after if _length_s(after) > _length_s(before) else before
            ends = before.detail.partition(_TO)[0], after.detail.rpartition(_TO)[2]
            made.append(
                replace(longer, start_s=before.start_s, end_s=after.end_s, detail=_TO.join(ends))
            )
    return made


def _joins(before: Bar, after: Bar, least_s: float) -> bool:
    if after.start_s - before.end_s > max(least_s, _SAME_S):
        return False
    is_alike = (before.kind, before.label, before.chunk) == (after.kind, after.label, after.chunk)
    return is_alike or max(_length_s(before), _length_s(after)) < least_s


def _length_s(bar: Bar) -> float:
    return bar.end_s - bar.start_s


def _rounded_times(bar: Bar) -> tuple[float, float]:
    """Return the times of a bar, rounded so that rounding errors vanish."""
    return round(bar.start_s / _SAME_S), round(bar.end_s / _SAME_S)
