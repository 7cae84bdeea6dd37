"""Whose turn it is on a rank whose strategy says the order of its forward and backward work.

An action is what the actors of one stage and phase do for one micro-batch: all segments, sums and
boxing in between. They are done in the order that the strategy gives (`Strategy.orders`), one after
the other:

    orders   0F0 0F1 0B0 0F2 ...
    turn     0   1   2   3         an actor of turn 3 starts when all of the turns 0 to 2 have

What is done once a step is in no action. Before the first are what the forward phase waits for,
such as parameters that are gathered once; behind the last are boxing of sums, and the optimizer.
Messages leave as soon as they are made, as other ranks wait for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sbp_core.compile.actors import Actor, Receive, Send
from sbp_core.compile.physical import RankPlan
from sbp_core.graph.ir import Phase, Rate
from sbp_core.pipeline import Action, ActionKind

_PHASES = {
    ActionKind.FORWARD: (Phase.FORWARD,),
    ActionKind.BACKWARD: (Phase.BACKWARD, Phase.WEIGHT_GRADIENT),
    ActionKind.INPUT_GRADIENT: (Phase.BACKWARD,),
    ActionKind.WEIGHT_GRADIENT: (Phase.WEIGHT_GRADIENT,),
}


def is_report(actor: Actor) -> bool:
    """Whether an actor receives a value for the user alone, which no other actor takes."""
    return isinstance(actor, Receive) and not actor.outputs and not actor.writes


class Turns:
    """The turns of one rank; without an order, every actor is always on.

    Attributes:
        now: The turn whose actors may start.

    Args:
        part: Of the rank.
        order: Of its actions; empty if the strategy leaves it to the quotas.
        num_micro_batches: Of a step.
    """

    def __init__(self, part: RankPlan, order: Sequence[Action], num_micro_batches: int) -> None:
        self._turns = {
            (action.stage, phase, action.micro_batch): turn
            for turn, action in enumerate(order)
            for phase in _PHASES[action.kind]
        }
        self._num_turns = len(order)
        self._waiting = Counter(
            turn
            for actor in part.actors
            for index in range(num_micro_batches)
            if (turn := self._turn(actor, index)) is not None
        )
        self.now = 0
        self._pass_on()

    def place(self, actor: Actor, index: int) -> int:
        """Return the place of a firing among those that could start."""
        turn = self._turn(actor, index)
        if turn is not None:
            return turn
        return -1 if actor.phase is Phase.FORWARD else self._num_turns

    def is_on(self, actor: Actor, index: int) -> bool:
        """Whether a firing may start, as far as the order of actions goes."""
        turn = self._turn(actor, index)
        return turn is None or turn <= self.now

    def start(self, actor: Actor, index: int) -> None:
        """Note that a firing has started."""
        turn = self._turn(actor, index)
        if turn is not None:
            self._waiting[turn] -= 1
            self._pass_on()

    def _turn(self, actor: Actor, index: int) -> int | None:
        if actor.rate is not Rate.MICRO or isinstance(actor, Send) or is_report(actor):
            return None
        return self._turns.get((actor.stage, actor.phase, index))

    def _pass_on(self) -> None:
        # An action may have no actors, such as the weight gradients of a stage without weights.
        while self.now < self._num_turns and not self._waiting[self.now]:
            self.now += 1
