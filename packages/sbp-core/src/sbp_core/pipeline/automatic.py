"""A schedule found by search: at least as good as any that has a name.

1. Every named schedule that flushes and keeps to the memory is tried.
2. List schedules are made with several limits of activations and several urgencies.
3. The best of each most of activations are improved by swaps on the critical path
   (`local_search`), which keep to it.
4. The search ends early where the makespan reaches a bound that no order can beat.

Better is, in this order: a shorter makespan, fewer activations alive on the fullest rank, fewer on
all ranks together, fewer split backwards.

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from sbp_core.errors import ConfigError
from sbp_core.pipeline.action import Action, ActionKind
from sbp_core.pipeline.list_scheduling import Preference, list_schedule
from sbp_core.pipeline.local_search import improve
from sbp_core.pipeline.policies import POLICIES, loop_placement, named_schedule, v_placement
from sbp_core.pipeline.precedence import Precedence
from sbp_core.pipeline.schedule import PipelineSchedule
from sbp_core.pipeline.simulate import simulate
from sbp_core.pipeline.times import StageTimes

_MOST_FIRINGS = 400_000
"""So many actions all list schedules of a placement together may place."""
_IMPROVED = 3
"""So many of the best schedules are improved, each with another most of activations alive."""

_Placement = tuple[tuple[int, ...], ...]
_Score = tuple[Fraction, Fraction, Fraction, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticSearch:
    """What a schedule is searched for.

    Args:
        num_ranks: Ranks of the pipeline.
        num_micro_batches: Micro-batches of a step.
        num_chunks: Stages a rank; `None` tries one and two.
        times: Of each rank.
        transfer: Time between stages of different ranks.
        memory: The most activations alive on a rank, in those of its whole part; `None` for any.
    """

    num_ranks: int
    num_micro_batches: int
    num_chunks: int | None
    times: tuple[StageTimes, ...]
    transfer: Fraction
    memory: Fraction | None

    def run(self) -> PipelineSchedule:
        """Return the best schedule that was found.

        Raises:
            ConfigError: No order keeps to the memory.
        """
        found = sorted(self._candidates(), key=self.score)
        if not found:
            raise ConfigError(
                f"no order of {self.num_micro_batches} micro-batches on {self.num_ranks} ranks "
                f"keeps at most {self.memory} activations alive on a rank",
                accepted="memory of at least 1: the activations of a rank's whole part",
                todo="allow more, or leave memory out",
            )
        least = min(self._least(one.placement) for one in found)
        best = found[0]
        if self.score(best)[0] > least:
            by_peak = {self.score(one)[1]: one for one in reversed(found)}
            starts = sorted(by_peak.values(), key=self.score)[:_IMPROVED]
            tried = [self._improved(one) for one in starts]
            best = min([best, *tried], key=self.score)
        return replace(self._with_whole_backwards(best), name="auto")

    def score(self, schedule: PipelineSchedule) -> _Score:
        """Return what is compared: less is better."""
        live = [schedule.live(rank) for rank in range(self.num_ranks)]
        makespan = self._makespan(schedule)
        return (makespan, max(live), sum(live, Fraction(0)), schedule.splits_backward)

    def _makespan(self, schedule: PipelineSchedule) -> Fraction:
        rows = [(one.forward, one.input_gradient, one.weight_gradient) for one in self.times]
        return simulate(schedule, rows, transfer=self.transfer).makespan

    def _fits(self, schedule: PipelineSchedule) -> bool:
        ranks = range(self.num_ranks)
        return self.memory is None or all(schedule.live(rank) <= self.memory for rank in ranks)

    def _candidates(self) -> Iterator[PipelineSchedule]:
        for name, policy in POLICIES.items():
            for chunks in [self.num_chunks] if self.num_chunks else [1, 2]:
                try:
                    named = named_schedule(name, self.num_ranks, self.num_micro_batches, chunks)
                except ConfigError:
                    continue
                if policy.flushes and self._fits(named):
                    yield named
        for placement in self._placements():
            yield from self._listed(placement)

    def _placements(self) -> Iterator[_Placement]:
        for chunks in [self.num_chunks] if self.num_chunks else [1, 2]:
            yield loop_placement(self.num_ranks, chunks)
            if chunks == 2 and self.num_ranks > 1:
                yield v_placement(self.num_ranks)

    def _listed(self, placement: _Placement) -> Iterator[PipelineSchedule]:
        work = self._work(placement)
        rounds = max(1, _MOST_FIRINGS // len(work.before))
        for preference in list(self._preferences(len(placement[0])))[:rounds]:
            orders = list_schedule(work, preference)
            if orders is not None:
                yield self._schedule(work, orders)

    def _preferences(self, chunks: int) -> Iterator[Preference]:
        p, m = self.num_ranks, self.num_micro_batches
        most = m * chunks if self.memory is None else min(m * chunks, int(self.memory * chunks))
        wanted = [
            p * chunks,
            2 * p * chunks,
            (p + 1) * chunks,
            most,
            *range(chunks, 2 * p * chunks),
        ]
        even = [min(most, limit) for limit in wanted]
        limits = [(limit,) * p for limit in dict.fromkeys(even) if limit >= chunks]
        falling = tuple(max(chunks, min(most, (p - rank) * chunks)) for rank in range(p))
        if most >= chunks:
            limits.insert(1, falling)
        for limit in limits:
            for forward_first in (False, True):
                for patient in (False, True):
                    for depth_first in (True, False) if chunks > 1 else (True,):
                        yield Preference(
                            limits=limit,
                            forward_first=forward_first,
                            depth_first=depth_first,
                            patient=patient,
                        )

    def _work(self, placement: _Placement) -> Precedence:
        return Precedence(placement, self.num_micro_batches, self.times, self.transfer)

    def _schedule(self, work: Precedence, orders: Sequence[Sequence[int]]) -> PipelineSchedule:
        return PipelineSchedule(
            name="auto",
            num_micro_batches=self.num_micro_batches,
            placement=tuple(map(tuple, work.placement)),
            orders=tuple(tuple(map(work.action, order)) for order in orders),
            micro_batches_per_update=self.num_micro_batches,
        )

    def _improved(self, schedule: PipelineSchedule) -> PipelineSchedule:
        work = self._work(schedule.placement)
        orders = [
            [work.number(half) for action in order for half in _halves(action)]
            for order in schedule.orders
        ]
        most = self.score(schedule)[1]
        limits = [int(most * len(held)) for held in schedule.placement]
        least = int(self._least(schedule.placement) / work.unit)
        return self._schedule(work, improve(work, orders, limits, least))

    def _with_whole_backwards(self, schedule: PipelineSchedule) -> PipelineSchedule:
        """Join gradients that follow each other, if that takes no longer."""
        joined = replace(schedule, orders=tuple(_joined(order) for order in schedule.orders))
        return joined if self._makespan(joined) <= self._makespan(schedule) else schedule

    def _least(self, placement: _Placement) -> Fraction:
        """Return a makespan that no order on this placement is below.

        A rank begins when the forward has come to it, and does all of its work; or it does all but
        its weight gradients, the last of its gradients goes back to the first stage, and the first
        stage does its own weight gradient.
        """
        chunk = [
            (
                one.forward / len(held),
                one.input_gradient / len(held),
                one.weight_gradient / len(held),
            )
            for one, held in zip(self.times, placement, strict=True)
        ]
        rank_of = {stage: rank for rank, held in enumerate(placement) for stage in held}
        least, m = Fraction(0), self.num_micro_batches
        for rank, held in enumerate(placement):
            earlier = [chunk[rank_of[stage]] for stage in range(held[0])]
            there = sum((one[0] + self.transfer for one in earlier), Fraction(0))
            back = sum((one[1] + self.transfer for one in earlier), Fraction(0))
            time = self.times[rank]
            ending = chunk[rank_of[0]][2] if rank else time.weight_gradient / len(held)
            least = max(
                least,
                there + m * time.work,
                there + m * (time.forward + time.input_gradient) + back + ending,
            )
        return least


def _halves(action: Action) -> tuple[Action, ...]:
    if action.kind is not ActionKind.BACKWARD:
        return (action,)
    return tuple(
        Action(action.stage, kind, action.micro_batch)
        for kind in (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    )


def _joined(order: Sequence[Action]) -> tuple[Action, ...]:
    joined: list[Action] = []
    for action in order:
        last = joined[-1] if joined else None
        if (
            last is not None
            and action.kind is ActionKind.WEIGHT_GRADIENT
            and last == Action(action.stage, ActionKind.INPUT_GRADIENT, action.micro_batch)
        ):
            joined[-1] = Action(action.stage, ActionKind.BACKWARD, action.micro_batch)
        else:
            joined.append(action)
    return tuple(joined)
