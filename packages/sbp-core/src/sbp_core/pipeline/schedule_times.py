"""The timing of a pipeline schedule: begin and end of each action, makespan, bubble and memory.

An action begins when its rank has finished the previous action of its order, and its inputs have
arrived; see `Precedence`. So a schedule and its times have exactly one result, and it is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import inf, lcm

from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.pipeline.schedule import Action, ActionKind, PipelineSchedule
from sbp_core.timeline import Bar, Lane, Timeline

Duration = int | float | Fraction
"""A time that somebody gives; a float stands for the exact number that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The times of one rank for one micro-batch, summed over its chunks.

    Args:
        forward: F, above 0.
        input_gradient: I, at least 0.
        weight_gradient: W, at least 0. The whole backward takes I + W.
    """

    forward: Fraction
    input_gradient: Fraction
    weight_gradient: Fraction

    def of_chunk(self, num_chunks: int) -> tuple[Fraction, Fraction, Fraction]:
        """Return F, I and W of one of several chunks, which take equal parts."""
        parts = (self.forward, self.input_gradient, self.weight_gradient)
        forward, input_gradient, weight_gradient = (part / num_chunks for part in parts)
        return forward, input_gradient, weight_gradient

    @property
    def work(self) -> Fraction:
        """F + I + W."""
        return self.forward + self.input_gradient + self.weight_gradient


def stage_times(times: Sequence[object], num_ranks: int) -> tuple[StageTimes, ...]:
    """Return the times of each rank.

    Args:
        times: `[F, I, W]` for all ranks, or one such list for each rank.
        num_ranks: Ranks of the pipeline.

    Raises:
        ConfigError: There are not three times, or not one list for each rank; a time is negative, a
            forward takes none, or it is not a number.
    """
    nested = bool(times) and all(isinstance(one, Sequence) for one in times)
    rows = list(times) if nested else [times] * num_ranks
    if len(rows) != num_ranks:
        raise ConfigError(
            f"times of {len(rows)} stages for a pipeline of {num_ranks} ranks",
            accepted="[F, I, W] for all ranks, or one such list for each rank",
            todo=f"write {num_ranks} lists, or one",
        )
    found = []
    for rank, row in enumerate(rows):
        where = f"times of rank {rank}" if nested else "times"
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 3:
            raise ConfigError(
                f"{row!r} is not what a rank's forward and backward take",
                where=where,
                accepted="three times: forward, input gradient, weight gradient, such as "
                "[1, 1.25, 0.75]",
                todo="write F, I and W; where the backward is not split, its time is I + W",
            )
        forward, input_gradient, weight_gradient = (duration(one, where) for one in row)
        if not forward or not input_gradient + weight_gradient:
            raise ConfigError(
                f"a forward or a backward of {[float(one) for one in (forward, input_gradient)]} "
                "takes no time",
                where=where,
                accepted="F > 0 and I + W > 0",
            )
        found.append(
            StageTimes(
                forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
            )
        )
    return tuple(found)


def duration(value: object, where: str) -> Fraction:
    """Return a time of at least 0 as an exact number.

    Raises:
        ConfigError: It is negative, infinite, or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Duration) or not 0 <= value < inf:
        raise ConfigError(
            f"{value!r} is no time",
            where=where,
            accepted="numbers of at least 0, such as 1, 0.75 or 2e-3",
        )
    return Fraction(value)


_PARTS = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.INPUT_GRADIENT: 1,
    ActionKind.WEIGHT_GRADIENT: 2,
}


class Precedence:
    """The actions of a pipeline with their dependencies and times, as integers.

    Actions are numbers here, so that a search can time ten thousands of orders; times are integers,
    so that no sum is rounded. For stage s, part x (0 forward, 1 backward or its input gradient, 2
    weight gradient) and micro-batch k, an action is (3s + x)m + k. The dependencies are:

        F(s, k)  after F(s-1, k)
        I(s, k)  after I(s+1, k), and after F(s, k)
        W(s, k)  after I(s, k)

    A transfer separates stages on different ranks. A rank does one action at a time, in its order.

    Args:
        placement: The stages of each rank.
        num_micro_batches: m.
        times: The times of each rank; each of its chunks takes an equal part.
        transfer: The time from a stage to the next one on another rank.
    """

    def __init__(
        self,
        placement: Sequence[Sequence[int]],
        num_micro_batches: int,
        times: Sequence[StageTimes],
        transfer: Fraction,
    ) -> None:
        self.num_micro_batches = m = num_micro_batches
        self.placement = placement
        self.rank_of = {stage: rank for rank, held in enumerate(placement) for stage in held}
        self.chunk_times = [
            time.of_chunk(len(held)) for held, time in zip(placement, times, strict=True)
        ]
        numbers = [transfer, *(one for chunk in self.chunk_times for one in chunk)]
        #: The unit of time: all times are whole multiples of it.
        self.unit = Fraction(1, lcm(*(number.denominator for number in numbers)))
        self.num_stages = len(self.rank_of)
        self.rank: list[int] = []
        self.duration: list[int] = []
        for stage in range(self.num_stages):
            rank = self.rank_of[stage]
            for one in self.chunk_times[rank]:
                self.duration += [int(one / self.unit)] * m
                self.rank += [rank] * m
        lag = int(transfer / self.unit)
        between = [
            lag if self.rank_of[stage] != self.rank_of[stage + 1] else 0
            for stage in range(self.num_stages - 1)
        ]
        self.before: list[tuple[tuple[int, int], ...]] = []
        """Of each action those that must be over, and how long ago."""
        for stage in range(self.num_stages):
            first = 3 * stage * m
            for k in range(m):
                self.before.append(((first - 3 * m + k, between[stage - 1]),) if stage else ())
            for k in range(m):
                behind = (
                    ((first + 4 * m + k, between[stage]),) if stage + 1 < self.num_stages else ()
                )
                self.before.append((*behind, (first + k, 0)))
            self.before += [((first + m + k, 0),) for k in range(m)]

    def number(self, action: Action) -> int:
        """Return the number of an action."""
        return (3 * action.stage + _PARTS[action.kind]) * self.num_micro_batches + (
            action.micro_batch
        )

    def action(self, number: int) -> Action:
        """Return the action of a number; backwards are split ones."""
        row, micro_batch = divmod(number, self.num_micro_batches)
        stage, part = divmod(row, 3)
        return Action(stage, ActionKind("FIW"[part]), micro_batch)

    def overlap(self, orders: Iterable[Sequence[Action]], overlapped: Set[Action]) -> None:
        """Make these forwards begin and end with the backwards after them in their orders."""
        m = self.num_micro_batches
        for order in orders:
            for forward, backward in pairwise(order):
                if forward not in overlapped:
                    continue
                first, second = self.number(forward), self.number(backward)
                self.before[first] += self.before[second]
                next_stage = first + 3 * m
                if next_stage < len(self.before):
                    (_, lag), *others = self.before[next_stage]
                    self.before[next_stage] = ((second, lag), *others)

    def whole_backwards(self, orders: Iterable[Iterable[Action]]) -> list[int]:
        """Return durations of actions in which the unsplit backwards of these orders take I + W."""
        durations, m = list(self.duration), self.num_micro_batches
        for order in orders:
            for action in order:
                if action.kind is ActionKind.BACKWARD:
                    number = self.number(action)
                    durations[number] += self.duration[number + m]
        return durations

    def ends(
        self, orders: Sequence[Sequence[int]], durations: Sequence[int] | None = None
    ) -> list[int] | None:
        """Return the end of each action if every rank follows its order.

        Args:
            orders: For each rank the numbers of its actions.
            durations: The duration of each action; those of split backwards if omitted.

        Returns:
            Ends by number, -1 for actions that are in no order; `None` if the orders deadlock.
        """
        duration = self.duration if durations is None else durations
        before, ends = self.before, [-1] * len(self.duration)
        position = [0] * len(orders)
        free = [0] * len(orders)
        waiting: dict[int, int] = {}
        ready = list(range(len(orders)))
        left = sum(map(len, orders))
        while ready:
            rank = ready.pop()
            order, at, now = orders[rank], position[rank], free[rank]
            while at < len(order):
                number = order[at]
                start = now
                for other, lag in before[number]:
                    end = ends[other]
                    if end < 0:
                        waiting[other] = rank
                        break
                    if end + lag > start:
                        start = end + lag
                else:
                    now = start + duration[number]
                    ends[number] = now
                    at += 1
                    left -= 1
                    if number in waiting:
                        ready.append(waiting.pop(number))
                    continue
                break
            position[rank], free[rank] = at, now
        return None if left else ends


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action with its time.

    Args:
        action: The action.
        start: Its begin, in the unit of the given times.
        end: Its end.
    """

    action: Action
    start: Fraction
    end: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSchedule:
    """The timing of a schedule.

    Args:
        schedule: The schedule that was simulated.
        ranks: For each rank its actions in their order.
        times: The times of the work of each rank.
        period: The time from one update of the weights to the next in the steady state. For a
            schedule that flushes, which makes one step after the other, it is the makespan.
    """

    schedule: PipelineSchedule
    ranks: tuple[tuple[TimedAction, ...], ...]
    times: tuple[StageTimes, ...]
    period: Fraction

    @property
    def makespan(self) -> Fraction:
        """The time from the first begin to the last end on any rank."""
        return max(order[-1].end for order in self.ranks)

    @property
    def span(self) -> Fraction:
        """The longest time from a rank's own first begin to its own last end.

        It is the time of a step if ranks need not wait for each other between steps.
        """
        return max(order[-1].end - order[0].start for order in self.ranks)

    @property
    def idle(self) -> tuple[Fraction, ...]:
        """For each rank the time of the makespan in which it is idle."""
        m = self.schedule.num_micro_batches
        return tuple(self.makespan - m * time.work for time in self.times)

    @property
    def bubble(self) -> Fraction:
        """The idle time of a rank, on average: makespan - m(F + B) if all ranks are alike."""
        return sum(self.idle, Fraction(0)) / len(self.ranks)

    @property
    def live(self) -> tuple[Fraction, ...]:
        """For each rank the most activations alive; see `PipelineSchedule.live`."""
        return tuple(self.schedule.live(rank) for rank in range(self.schedule.num_ranks))

    def timeline(self) -> Timeline:
        """Return a lane of bars for each rank, labelled by micro-batch."""
        held = self.schedule.placement
        return Timeline(
            title=f"{self.schedule.name}: {self.schedule.num_ranks} ranks, "
            f"{self.schedule.num_micro_batches} micro-batches",
            unit="",
            lanes=tuple(
                Lane(
                    name=f"rank {rank}",
                    bars=tuple(
                        Bar(
                            label=str(one.action.micro_batch),
                            kind=one.action.kind,
                            start_s=float(one.start),
                            end_s=float(one.end),
                            micro_batch=one.action.micro_batch,
                            chunk=held[rank].index(one.action.stage),
                            detail=f"{one.action}: {one.action.kind.name.lower().replace('_', ' ')}"
                            f" of micro-batch {one.action.micro_batch} at stage {one.action.stage}",
                        )
                        for one in order
                    ),
                )
                for rank, order in enumerate(self.ranks)
            ),
        )


def simulate_schedule(
    schedule: PipelineSchedule, times: Sequence[object], *, transfer: Duration = 0
) -> SimulatedSchedule:
    """Return the timing of a schedule.

    Args:
        schedule: The schedule.
        times: `[F, I, W]` of the work of one rank on one micro-batch, all of its chunks together,
            each of which takes an equal part; or such a list for each rank. A whole backward takes
            I + W.
        transfer: The time from a stage to the next one on another rank; a rank may compute
            meanwhile.

    Raises:
        ConfigError: The times are not those of this pipeline.
        SbpValueError: The orders deadlock: each rank waits for an action of another.
    """
    by_rank = stage_times(times, schedule.num_ranks)
    lag = duration(transfer, "transfer")
    work = Precedence(schedule.placement, schedule.num_micro_batches, by_rank, lag)
    work.overlap(schedule.orders, schedule.overlapped)
    durations = work.whole_backwards(schedule.orders)
    orders = [[work.number(action) for action in order] for order in schedule.orders]
    ends = work.ends(orders, durations)
    if ends is None:
        raise SbpValueError(
            f"schedule {schedule.name!r} deadlocks: its ranks wait for each other",
            accepted="orders in which every action comes after what it needs",
            todo="compare the orders of neighbouring ranks",
        )
    ranks = tuple(
        tuple(
            TimedAction(
                action=action,
                start=(ends[number] - durations[number]) * work.unit,
                end=ends[number] * work.unit,
            )
            for action, number in zip(order, numbers, strict=True)
        )
        for order, numbers in zip(schedule.orders, orders, strict=True)
    )
    simulated = SimulatedSchedule(schedule=schedule, ranks=ranks, times=by_rank, period=Fraction(0))
    period = (
        simulated.makespan
        if schedule.flushes
        else alternation_period(by_rank, lag) * schedule.micro_batches_per_update
    )
    return replace(simulated, period=period)


def alternation_period(times: Sequence[StageTimes], transfer: Fraction) -> Fraction:
    """Return the time between micro-batches of a 1F1B that never drains, in the long run.

    Rank r of p does w = p-1-r forwards ahead, then F and B in turn, for ever. The dependencies:

        F(r, k)          after  F(r-1, k)                   one stage after the other
        B(r, k)          after  B(r+1, k), or F(r, k) on the last rank
        B(r, k)          after  F(r, k + w)                 the order of a rank
        F(r, k + w + 1)  after  B(r, k)

    A dependency over d micro-batches is an edge of delay d. In the long run a micro-batch takes the
    maximum over all cycles of (time on the cycle) / (delays on the cycle), and reaches it.

    Args:
        times: The times of each rank.
        transfer: The time between neighbouring ranks.
    """
    # Imported here because it needs NumPy, which schedules by name do not.
    from sbp_core.dataflow.cycle_ratio import maximum_cycle_ratio

    # The forward of rank r is node 2r, its backward 2r + 1.
    edges: list[tuple[int, int, int]] = []
    weights: list[Fraction] = []
    for r, time in enumerate(times):
        backward, ahead = time.input_gradient + time.weight_gradient, len(times) - 1 - r
        edges += [(2 * r, 2 * r + 1, -ahead), (2 * r + 1, 2 * r, ahead + 1)]
        weights += [time.forward, backward]
        if r:
            edges.append((2 * r + 1, 2 * r - 1, 0))
            weights.append(backward + transfer)
        if ahead:
            edges.append((2 * r, 2 * r + 2, 0))
            weights.append(time.forward + transfer)
    found = maximum_cycle_ratio(edges, weights, [Fraction(0)] * (2 * len(times)))
    assert found is not None, "a rank's forward and backward wait for each other"
    return Fraction(found[0])
