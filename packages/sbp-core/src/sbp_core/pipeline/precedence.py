"""What has to be over before an action may begin, and how long actions take: in whole numbers.

Actions are numbers here, so that a search can time ten thousands of orders: of stage s, part x
(0 forward, 1 backward or its input gradient, 2 weight gradient) and micro-batch k it is
(3s + x)m + k.

    F(s, k)  after F(s-1, k)
    I(s, k)  after I(s+1, k), and after F(s, k)
    W(s, k)  after I(s, k)

Between stages on different ranks lies a transfer. A rank does one action at a time, in its order.

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from fractions import Fraction
from itertools import pairwise

from sbp_core.pipeline.action import Action, ActionKind
from sbp_core.pipeline.times import StageTimes, common_unit

_PARTS = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.INPUT_GRADIENT: 1,
    ActionKind.WEIGHT_GRADIENT: 2,
}


class Precedence:
    """The actions of a pipeline of a placement, with times.

    Args:
        placement: The stages of each rank.
        num_micro_batches: m.
        times: Of each rank; each of its chunks takes an equal part.
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
        chunk_times = [
            tuple(
                one / len(held) for one in (time.forward, time.input_gradient, time.weight_gradient)
            )
            for held, time in zip(placement, times, strict=True)
        ]
        self.unit = common_unit([transfer, *(one for chunk in chunk_times for one in chunk)])
        self.num_stages = len(self.rank_of)
        self.rank: list[int] = []
        self.duration: list[int] = []
        for stage in range(self.num_stages):
            rank = self.rank_of[stage]
            for one in chunk_times[rank]:
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
        """Return the action of a number; backwards are those that are split."""
        row, micro_batch = divmod(number, self.num_micro_batches)
        stage, part = divmod(row, 3)
        return Action(stage, ActionKind("FIW"[part]), micro_batch)

    def overlap(self, orders: Iterable[Sequence[Action]], overlapped: Set[Action]) -> None:
        """Let these forwards begin and end with the backwards behind them in their orders."""
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
        """Return the durations if the backwards that these orders hold whole take I + W."""
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
        """Return when each action ends if every rank keeps to its order and never waits in vain.

        Args:
            orders: For each rank the numbers of its actions.
            durations: Of each action, if not those of a split backward.

        Returns:
            Ends by number, -1 for actions that are in no order; `None` if the orders stand still.
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
