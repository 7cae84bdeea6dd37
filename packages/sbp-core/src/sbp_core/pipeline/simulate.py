"""A schedule in time: when each action begins and ends, and what follows from that.

An action begins when its rank has done the one before it in its order, and what it needs has
arrived; see `precedence`. So there is one answer for a schedule and times, and it is exact.

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from sbp_core.errors import SbpValueError
from sbp_core.pipeline.action import Action, ActionKind
from sbp_core.pipeline.period import alternation_period
from sbp_core.pipeline.precedence import Precedence
from sbp_core.pipeline.schedule import PipelineSchedule
from sbp_core.pipeline.times import Duration, StageTimes, duration, stage_times
from sbp_core.timeline import Bar, Lane, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action with its time.

    Args:
        action: What is done.
        start: When it begins, in the unit of the times that were given.
        end: When it ends.
    """

    action: Action
    start: Fraction
    end: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSchedule:
    """What a schedule takes.

    Args:
        schedule: What was simulated.
        ranks: For each rank its actions in their order.
        times: What the work of each rank takes.
        period: The time from one update of the weights to the next when the pipeline has run for
            long. A schedule that flushes makes one step after the other: its makespan.
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

        It is what a step takes where a rank need not wait for the others between steps.
        """
        return max(order[-1].end - order[0].start for order in self.ranks)

    @property
    def idle(self) -> tuple[Fraction, ...]:
        """For each rank how much of the makespan it does nothing."""
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
                            detail=f"{one.action}: {_words(one.action)}",
                        )
                        for one in order
                    ),
                )
                for rank, order in enumerate(self.ranks)
            ),
        )


def simulate(
    schedule: PipelineSchedule, times: Sequence[object], *, transfer: Duration = 0
) -> SimulatedSchedule:
    """Return what a schedule takes.

    Args:
        schedule: Who does what in which order.
        times: `[F, I, W]` of the work of one rank on one micro-batch, all of its chunks together,
            each of which takes an equal part; or such a list for each rank. A whole backward takes
            I + W.
        transfer: The time from a stage to the next one on another rank; a rank may compute
            meanwhile.

    Raises:
        ConfigError: The times are not those of this pipeline.
        SbpValueError: The orders stand still: each rank waits for an action of another.
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
            f"schedule {schedule.name!r} stands still: its ranks wait for each other",
            accepted="orders in which every action comes behind what it needs",
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


def _words(action: Action) -> str:
    kind = {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.INPUT_GRADIENT: "input gradient",
        ActionKind.WEIGHT_GRADIENT: "weight gradient",
    }[action.kind]
    return f"{kind} of micro-batch {action.micro_batch} at stage {action.stage}"
