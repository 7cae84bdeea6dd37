"""Warn of `optimizer.step()` in a loop whose parallel steps already include the update.

the loop calls no backward    `optimizer.step()` changes nothing
the loop calls backward       it updates the parameters once more, and the step uses the new values
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sbp_torch.optim import tell_steps

logger = logging.getLogger(__name__)


class OptimizerCalls:
    """Warns once if `optimizer.step()` is called.

    Attributes:
        is_open: Whether the parallel step is started and not over; calls outside are not reported.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._has_told = False
        self._ends: list[Callable[[], None]] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch an optimizer. Call this before the capture, after which its hooks are compared."""
        self._ends.append(tell_steps(optimizer, self._tell))

    def end(self) -> None:
        """Stop watching all optimizers."""
        self.is_open = False
        while self._ends:
            self._ends.pop()()

    def _tell(self, optimizer: torch.optim.Optimizer, has_gradients: bool) -> None:
        if not self.is_open or self._has_told:
            return
        self._has_told = True
        logger.warning(
            "%s.step() was called in addition to the step of parallelize, and %s: step(batch) does "
            "forward, backward and update; leave this call out",
            type(optimizer).__name__,
            "updates its parameters once more, by gradients of a backward of the loop"
            if has_gradients
            else "changes nothing, because there are no gradients outside of a step",
        )
