"""Make a pipeline schedule by its name, or search for the shortest one (`auto`).

The result of the search is at least as good as any named schedule:

1. Every named schedule that flushes (drains after each step) and respects the memory is tried.
2. List schedules are made with several limits of activations and several priorities.
3. For each peak of activations, the best schedule is improved by swaps on the critical path
   (`improve`) that keep this peak.
4. The search ends early if the makespan reaches a bound that no order can beat.

Better is, in this order: a shorter makespan, fewer activations alive on the fullest rank, fewer on
all ranks together, fewer split backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import accumulate, product

from sbp_core.errors import ConfigError, unknown_name
from sbp_core.pipeline.policies import POLICIES, loop_placement, named_schedule, v_placement
from sbp_core.pipeline.schedule import Action, ActionKind, PipelineSchedule
from sbp_core.pipeline.schedule_times import (
    Duration,
    Precedence,
    StageTimes,
    duration,
    simulate_schedule,
    stage_times,
)

AUTO = "auto"
SCHEDULES: tuple[str, ...] = (*POLICIES, AUTO)
"""The names that `pipeline_schedule` knows."""

_MOST_LISTED = 400_000
"""So many actions all list schedules of a placement together may place."""
_MOST_TRIED = 600_000
"""So many actions all orders that are tried may have together, of each start: a second or so."""
_IMPROVED = 3
"""So many of the best schedules are improved, each with another most of activations alive."""
_FARTHEST = 4
"""An action goes ahead of so many at once, at most."""

_Placement = tuple[tuple[int, ...], ...]
_Score = tuple[Fraction, Fraction, Fraction, bool]


def pipeline_schedule(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    num_chunks: int | None = None,
    times: Sequence[object] | None = None,
    transfer: Duration = 0,
    memory: Duration | None = None,
) -> PipelineSchedule:
    """Return the schedule with a name, for one step.

    Args:
        name: One of `SCHEDULES`. `auto` searches for the shortest schedule, and among equally short
            ones for the one with the fewest activations alive.
        num_ranks: Ranks of the pipeline, at least 1.
        num_micro_batches: Micro-batches of a step, at least 1.
        num_chunks: Stages of each rank, at least 1; by default 2 if the named schedule needs
            several, else 1; `auto` tries both.
        times: `[F, I, W]` of one rank's part, or one such list for each rank, for `auto`; by
            default all three are equal.
        transfer: The time from a stage to the next one on another rank, for `auto`.
        memory: The most activations alive on a rank, in units of its whole part; unlimited if None.

    Raises:
        ConfigError: The name is unknown, or the schedule is undefined here or needs more memory.

    >>> [str(action) for action in pipeline_schedule("1f1b", 2, 2).orders[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    if name not in SCHEDULES:
        unknown = unknown_name("schedule of a pipeline", name, SCHEDULES)
        raise unknown.replaced(ConfigError)
    numbers = {"ranks": num_ranks, "micro-batches": num_micro_batches, "chunks a rank": num_chunks}
    for what, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(
                f"a pipeline of {number} {what}", accepted="1, 2, 3, ...", todo=f"take more {what}"
            )
    limit = None if memory is None else duration(memory, "memory")
    if name == AUTO:
        return _Search(
            num_ranks=num_ranks,
            num_micro_batches=num_micro_batches,
            chunks=(num_chunks,) if num_chunks else (1, 2),
            times=stage_times(times or [1, 1, 1], num_ranks),
            transfer=duration(transfer, "transfer"),
            memory=limit,
        ).run()
    schedule = named_schedule(name, num_ranks, num_micro_batches, num_chunks)
    live = max(schedule.live(rank) for rank in range(num_ranks))
    if limit is not None and live > limit:
        raise ConfigError(
            f"the schedule {name!r} keeps up to {float(live):g} activations alive on a "
            f"rank, and {float(limit):g} are allowed",
            accepted=f"memory of at least {float(live):g} for it",
            todo="allow more, or take 'auto', which keeps to it",
        )
    return schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The search for the shortest schedule.

    Args:
        num_ranks: Ranks of the pipeline.
        num_micro_batches: Micro-batches of a step.
        chunks: Numbers of stages of a rank that are tried.
        times: The times of each rank.
        transfer: Time between stages of different ranks.
        memory: The most activations alive on a rank, in units of its whole part; `None` for any.
    """

    num_ranks: int
    num_micro_batches: int
    chunks: tuple[int, ...]
    times: tuple[StageTimes, ...]
    transfer: Fraction
    memory: Fraction | None

    def run(self) -> PipelineSchedule:
        """Return the best schedule that was found.

        Raises:
            ConfigError: No order respects the memory.
        """
        found = sorted(self._candidates(), key=self.score)
        if not found:
            raise ConfigError(
                f"no order of {self.num_micro_batches} micro-batches on {self.num_ranks} ranks "
                f"keeps at most {self.memory} activations alive on a rank",
                accepted="memory of at least 1: the activations of a rank's whole part",
                todo="allow more, or leave memory out",
            )
        best = found[0]
        if self.score(best)[0] > min(self._least(one.placement) for one in found):
            by_peak = {self.score(one)[1]: one for one in reversed(found)}
            starts = sorted(by_peak.values(), key=self.score)[:_IMPROVED]
            best = min([best, *map(self._improved, starts)], key=self.score)
        # Consecutive gradients of one stage and micro-batch are joined, if that takes no longer.
        joined = replace(best, orders=tuple(_joined(order) for order in best.orders))
        is_as_short = self.score(joined)[0] <= self.score(best)[0]
        return replace(joined if is_as_short else best, name=AUTO)

    def score(self, schedule: PipelineSchedule) -> _Score:
        """Return the key for comparing schedules: less is better."""
        live = [schedule.live(rank) for rank in range(self.num_ranks)]
        rows = [one.of_chunk(1) for one in self.times]
        makespan = simulate_schedule(schedule, rows, transfer=self.transfer).makespan
        return (makespan, max(live), sum(live, Fraction(0)), schedule.splits_backward)

    def _candidates(self) -> Iterator[PipelineSchedule]:
        p, m = self.num_ranks, self.num_micro_batches
        for name, policy in POLICIES.items():
            for chunks in self.chunks:
                try:
                    named = named_schedule(name, p, m, chunks)
                except ConfigError:
                    continue
                most = max(named.live(rank) for rank in range(p))
                if policy.flushes and (self.memory is None or most <= self.memory):
                    yield named
        placements = [loop_placement(p, chunks) for chunks in self.chunks]
        if 2 in self.chunks and p > 1:
            placements.insert(self.chunks.index(2) + 1, v_placement(p))
        for placement in placements:
            work = self._work(placement)
            rounds = max(1, _MOST_LISTED // len(work.before))
            for preference in list(self._preferences(len(placement[0])))[:rounds]:
                orders = list_schedule(work, preference)
                if orders is not None:
                    yield self._schedule(work, orders)

    def _preferences(self, chunks: int) -> Iterator[Preference]:
        p, m = self.num_ranks, self.num_micro_batches
        most = m * chunks if self.memory is None else min(m * chunks, int(self.memory * chunks))
        near = [p * chunks, 2 * p * chunks, (p + 1) * chunks, most]
        even = [min(most, limit) for limit in (*near, *range(chunks, 2 * p * chunks))]
        limits = [(limit,) * p for limit in dict.fromkeys(even) if limit >= chunks]
        if most >= chunks:
            falling = (max(chunks, min(most, (p - rank) * chunks)) for rank in range(p))
            limits.insert(1, tuple(falling))
        either, deep = (False, True), (True, False) if chunks > 1 else (True,)
        for limit, forward_first, patient, depth_first in product(limits, either, either, deep):
            yield Preference(
                limits=limit, forward_first=forward_first, depth_first=depth_first, patient=patient
            )

    def _work(self, placement: _Placement) -> Precedence:
        return Precedence(placement, self.num_micro_batches, self.times, self.transfer)

    def _schedule(self, work: Precedence, orders: Sequence[Sequence[int]]) -> PipelineSchedule:
        return PipelineSchedule(
            name=AUTO,
            num_micro_batches=self.num_micro_batches,
            placement=tuple(map(tuple, work.placement)),
            orders=tuple(tuple(map(work.action, order)) for order in orders),
            micro_batches_per_update=self.num_micro_batches,
        )

    def _improved(self, schedule: PipelineSchedule) -> PipelineSchedule:
        work = self._work(schedule.placement)
        orders = [
            [
                work.number(half)
                for one in order
                for half in (one.halves if one.kind is ActionKind.BACKWARD else (one,))
            ]
            for order in schedule.orders
        ]
        most = self.score(schedule)[1]
        limits = [int(most * len(held)) for held in schedule.placement]
        least = int(self._least(schedule.placement) / work.unit)
        return self._schedule(work, improve(work, orders, limits, least))

    def _least(self, placement: _Placement) -> Fraction:
        """Return a lower bound of the makespan of all orders on this placement.

        A rank begins when the first forward reaches it, and does all of its work; or it does all
        but its weight gradients, the last of its input gradients is passed back to the first stage,
        and the first stage computes its own weight gradient.
        """
        chunk = [time.of_chunk(len(held)) for time, held in zip(self.times, placement, strict=True)]
        rank_of = {stage: rank for rank, held in enumerate(placement) for stage in held}
        least, m = Fraction(0), self.num_micro_batches
        for rank, held in enumerate(placement):
            earlier = [chunk[rank_of[stage]] for stage in range(held[0])]
            there = sum((one[0] + self.transfer for one in earlier), Fraction(0))
            back = sum((one[1] + self.transfer for one in earlier), Fraction(0))
            time = self.times[rank]
            ending = chunk[rank_of[0] if rank else rank][2]
            least = max(
                least,
                there + m * time.work,
                there + m * (time.forward + time.input_gradient) + back + ending,
            )
        return least


def _joined(order: Sequence[Action]) -> tuple[Action, ...]:
    joined: list[Action] = []
    for action in order:
        whole = replace(action, kind=ActionKind.BACKWARD)
        if joined and (joined[-1], action) == whole.halves:
            joined[-1] = whole
        else:
            joined.append(action)
    return tuple(joined)


# List scheduling.


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """The priorities of a list schedule when several actions are possible.

    Args:
        limits: For each rank the most activations of chunks alive.
        forward_first: Whether a forward comes before the gradient of an input.
        depth_first: Whether, of two forwards, the one of the later stage comes first.
        patient: Whether a weight gradient waits if it would delay an action that arrives soon.
    """

    limits: tuple[int, ...]
    forward_first: bool
    depth_first: bool
    patient: bool


def list_schedule(work: Precedence, preference: Preference) -> list[list[int]] | None:
    """Return for each rank the order of its actions; `None` if the limits cause a deadlock.

    Each idle rank does the most urgent of its possible actions.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies (1969); for pipelines the greedy
    search of Zero Bubble (arXiv 2401.10241) §3.1.
    """
    m, num_ranks = work.num_micro_batches, len(work.placement)
    chunk_of = {stage: chunk for held in work.placement for chunk, stage in enumerate(held)}
    after: list[list[tuple[int, int]]] = [[] for _ in work.before]
    missing = [len(before) for before in work.before]
    for number, before in enumerate(work.before):
        for other, lag in before:
            after[other].append((number, lag))

    def urgency(number: int) -> tuple[int, int, int]:
        stage, part = divmod(number // m, 3)
        if part == 0:
            deep = -stage if preference.depth_first else stage
            return (0 if preference.forward_first else 2, deep, number % m)
        return (1 if part == 1 else 3, number % m, stage)

    arrives: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    arrives[work.rank_of[0]] = [(0, k) for k in range(m)]
    ready: list[list[tuple[tuple[int, int, int], int]]] = [[] for _ in range(num_ranks)]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    alive, reached = [0] * num_ranks, [0] * len(work.before)
    clock = [(0, rank) for rank in range(num_ranks)]
    busy_until = [0] * num_ranks
    while clock:
        now, rank = heappop(clock)
        if now < busy_until[rank]:
            continue
        while arrives[rank] and arrives[rank][0][0] <= now:
            number = heappop(arrives[rank])[1]
            heappush(ready[rank], (urgency(number), number))
        held = len(work.placement[rank])
        chosen = None
        for entry in sorted(ready[rank]):
            stage, part = divmod(entry[1] // m, 3)
            spare = held - 1 - chunk_of[stage]
            if part == 0 and alive[rank] >= preference.limits[rank] - spare:
                continue
            if part == 2 and preference.patient and arrives[rank]:
                soon, coming = arrives[rank][0]
                takes = work.duration[entry[1]]
                urgent = coming // m % 3 == 1 or alive[rank] < preference.limits[rank]
                if urgent and soon < now + takes and 2 * (soon - now) < takes:
                    continue
            chosen = entry
            break
        if chosen is None:
            if arrives[rank]:
                heappush(clock, (max(now, arrives[rank][0][0]), rank))
            continue
        ready[rank].remove(chosen)
        ready[rank].sort()
        number = chosen[1]
        part = number // m % 3
        alive[rank] += (part == 0) - (part == 2)
        end = busy_until[rank] = now + work.duration[number]
        orders[rank].append(number)
        for other, lag in after[number]:
            missing[other] -= 1
            reached[other] = max(reached[other], end + lag)
            if not missing[other]:
                heappush(arrives[work.rank[other]], (reached[other], other))
                heappush(
                    clock, (max(reached[other], busy_until[work.rank[other]]), work.rank[other])
                )
        heappush(clock, (end, rank))
    done = sum(map(len, orders)) == len(work.before)
    return orders if done else None


# Local search.


def improve(
    work: Precedence, orders: Sequence[Sequence[int]], limits: Sequence[int], least: int
) -> list[list[int]]:
    """Return orders with a makespan of at most that of the given orders.

    The makespan is the length of a path on which each action begins when the previous one ends. To
    shorten it, the order has to change somewhere on this path: where two actions of one rank follow
    each other on the path, the second is moved before the first, or before several. The search also
    moves to orders that are equally long, but never back to an earlier one.

    Source: van Laarhoven, Aarts, Lenstra, Job Shop Scheduling by Simulated Annealing (1992) §3 for
    the neighbourhood; Glover, Tabu Search (1989).

    Args:
        work: The times and dependencies of the actions.
        orders: The start of the search: the numbers of each rank's actions, with split backwards.
        limits: For each rank the most activations of chunks alive.
        least: A lower bound of the makespan, in units of `work`.
    """
    best = now = [list(order) for order in orders]
    ends = work.ends(now)
    assert ends is not None, "a search begins with an order that runs"
    shortest = max(ends)
    seen = {hash(tuple(map(tuple, now)))}
    for _ in range(_MOST_TRIED // (len(ends) * 12)):
        if shortest <= least:
            break
        nearest: tuple[int, int, list[list[int]], list[int]] | None = None
        for rank, changed in _neighbours(work, now, ends):
            # The activations of chunks that are alive on the rank.
            parts = (number // work.num_micro_batches % 3 for number in changed[rank])
            alive = accumulate((part == 0) - (part == 2) for part in parts)
            is_new = hash(tuple(map(tuple, changed))) not in seen
            if not is_new or max(alive) > limits[rank]:
                continue
            times = work.ends(changed)
            if times is None:
                continue
            score = (max(times), sum(times[order[-1]] for order in changed))
            if nearest is None or score < nearest[:2]:
                nearest = (*score, changed, times)
            if score[0] < shortest:
                break
        if nearest is None:
            break
        length, _, now, ends = nearest
        seen.add(hash(tuple(map(tuple, now))))
        if length < shortest:
            best, shortest = now, length
    return best


def _neighbours(
    work: Precedence, orders: Sequence[list[int]], ends: Sequence[int]
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield a rank whose order changes, and the changed orders."""
    at = {number: place for order in orders for place, number in enumerate(order)}
    number = max(range(len(ends)), key=lambda one: ends[one])
    while True:
        rank, place = work.rank[number], at[number]
        start = ends[number] - work.duration[number]
        order = orders[rank]
        behind = order[place - 1] if place else None
        if behind is not None and ends[behind] == start:
            for ahead in range(1, min(_FARTHEST, place) + 1):
                changed = [*order]
                changed.insert(place - ahead, changed.pop(place))
                yield rank, [changed if one is order else one for one in orders]
            number = behind
        else:
            waited = [other for other, lag in work.before[number] if ends[other] + lag == start]
            if not waited:
                return
            number = waited[0]
