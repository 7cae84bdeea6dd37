"""`PipelineSchedule`: the stages of each rank, and the order of its forwards and backwards."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import product

from sbp_core.errors import SbpValueError


class ActionKind(StrEnum):
    """The kind of work of an action on a micro-batch; the letters are those of PyTorch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


_NOTATION = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of work on one micro-batch at one stage.

    Args:
        stage: Number of the stage, in the order of the forward pass: a rank with several chunks
            holds several stages.
        kind: `BACKWARD` is the whole backward; if it is split, the gradients of inputs and the
            gradients of weights are two actions.
        micro_batch: Number of the micro-batch in its step.

    >>> str(Action(3, ActionKind.FORWARD, 0)), Action.parse("12W7").kind.name
    ('3F0', 'WEIGHT_GRADIENT')
    """

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action in the notation of `torch.distributed.pipelining`: `"3F0"`.

        Raises:
            SbpValueError: The text is not an action.
        """
        found = _NOTATION.fullmatch(text)
        if found is None:
            raise SbpValueError(
                f"{text!r} is no action of a pipeline",
                accepted="<stage><F|B|I|W><micro-batch>, such as 3F0",
                todo="write the stage, one letter, and the micro-batch, without spaces",
            )
        return cls(int(found[1]), ActionKind(found[2]), int(found[3]))

    @property
    def halves(self) -> tuple[Action, Action]:
        """The two actions, input gradient and weight gradient, that form a whole backward."""
        return (
            Action(self.stage, ActionKind.INPUT_GRADIENT, self.micro_batch),
            Action(self.stage, ActionKind.WEIGHT_GRADIENT, self.micro_batch),
        )


_LAST_USE = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
"""With these ends what a forward has left for its backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """The order of the actions of each rank, for one step of `num_micro_batches`.

    Args:
        name: The policy that it follows.
        num_micro_batches: Micro-batches of a step.
        placement: For each rank of the pipeline the stages that it holds, ascending.
        orders: For each rank its actions in their order.
        overlapped: Forwards that run at once with the backward after them: both begin when the
            inputs of both have arrived, and end together. A runtime may also run them in turn.
        flushes: Whether all micro-batches of a step end before the next step begins. If not, the
            orders are those of a run of `num_micro_batches` from its first to its last, and the
            next ones would follow without a gap.
        micro_batches_per_update: The number of micro-batches in one update of the weights.

    Raises:
        SbpValueError: A stage is on no rank or on two; an action is missing, repeated, or on a rank
            that does not hold its stage.
    """

    name: str
    num_micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Action, ...], ...]
    overlapped: frozenset[Action] = frozenset()
    flushes: bool = True
    micro_batches_per_update: int

    def __post_init__(self) -> None:
        held = sorted(stage for stages in self.placement for stage in stages)
        if held != list(range(len(held))) or len(self.placement) != len(self.orders):
            raise SbpValueError(
                f"schedule {self.name!r} places the stages {held} on {len(self.placement)} ranks, "
                f"and has orders for {len(self.orders)}",
                accepted="each of the stages 0, 1, 2, ... on one rank, and an order for each rank",
            )
        for rank, (stages, order) in enumerate(zip(self.placement, self.orders, strict=True)):
            given = Counter(order)
            for stage, micro_batch in product(stages, range(self.num_micro_batches)):
                whole = Action(stage, ActionKind.BACKWARD, micro_batch)
                given.subtract((Action(stage, ActionKind.FORWARD, micro_batch),))
                given.subtract((whole,) if whole in given else whole.halves)
            wrong = [f"{action} {-count:+}" for action, count in given.items() if count]
            if wrong:
                raise SbpValueError(
                    f"schedule {self.name!r} has too many or too few of some actions: "
                    f"{', '.join(wrong[:8])}",
                    where=f"the order of rank {rank}, which holds the stages {stages}",
                    accepted="for each stage and micro-batch one F, and one B or one I and one W",
                )

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.placement)

    @property
    def num_stages(self) -> int:
        """The number of stages of the model: chunks of all ranks together."""
        return sum(map(len, self.placement))

    @property
    def num_chunks(self) -> int:
        """The most stages that a rank holds."""
        return max(map(len, self.placement))

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into the gradients of inputs and of weights."""
        return any(
            action.kind is ActionKind.WEIGHT_GRADIENT for order in self.orders for action in order
        )

    def rank_of(self) -> tuple[int, ...]:
        """Return for each stage the rank that holds it."""
        ranks = [0] * self.num_stages
        for rank, stages in enumerate(self.placement):
            for stage in stages:
                ranks[stage] = rank
        return tuple(ranks)

    def live(self, rank: int) -> Fraction:
        """Return the most activations alive on a rank, in units of one rank's whole part.

        The activations of a chunk live from the begin of its F to the end of its B or W, and count
        as one of as many parts as the rank has chunks. A rank does one action at a time, so the
        number follows from the order alone.
        """
        alive = most = 0
        for action in self.orders[rank]:
            if action.kind is ActionKind.FORWARD:
                alive += 1
                most = max(most, alive)
            elif action.kind in _LAST_USE:
                alive -= 1
        return Fraction(most, len(self.placement[rank]))
