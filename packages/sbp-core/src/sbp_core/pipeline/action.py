"""What a rank of a pipeline does at a time: one chunk's forward or backward of one micro-batch.

Stability: internal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from sbp_core.errors import SbpValueError


class ActionKind(StrEnum):
    """Which part of the work on a micro-batch an action is; the letters are those of PyTorch."""

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
        kind: `BACKWARD` is the whole backward; where it is split, the gradients of inputs and
            those of weights are two actions.
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
            SbpValueError: The text is no action.
        """
        found = _NOTATION.fullmatch(text)
        if found is None:
            raise SbpValueError(
                f"{text!r} is no action of a pipeline",
                accepted="<stage><F|B|I|W><micro-batch>, such as 3F0",
                todo="write the stage, one letter, and the micro-batch, without spaces",
            )
        return cls(int(found[1]), ActionKind(found[2]), int(found[3]))
