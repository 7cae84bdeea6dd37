"""Calls of `optimizer.step()` that were left in a loop, whose steps have taken the update already.

without a backward of the loop    the call changes nothing
with one                          it updates the parameters once more, and the step follows that
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sbp_torch.optim import tell_steps

logger = logging.getLogger(__name__)


class OptimizerCalls:
    """Warns of such calls, once.

    Attributes:
        is_open: Whether steps are taken.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._has_told = False
        self._ends: list[Callable[[], None]] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer; before it is captured, as its hooks are compared after that."""
        self._ends.append(tell_steps(optimizer, self._tell))

    def end(self) -> None:
        """Look at none any more."""
        self.is_open = False
        while self._ends:
            self._ends.pop()()

    def _tell(self, optimizer: torch.optim.Optimizer, has_gradients: bool) -> None:
        if not self.is_open or self._has_told:
            return
        self._has_told = True
        logger.warning(
            "%s.step() was called besides the step of parallelize, and %s: step(batch) does "
            "forward, backward and update; leave this call out",
            type(optimizer).__name__,
            "updates its parameters once more, by gradients of a backward of the loop"
            if has_gradients
            else "changes nothing, because there are no gradients outside of a step",
        )
