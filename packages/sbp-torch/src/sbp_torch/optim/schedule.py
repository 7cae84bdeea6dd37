"""`TorchSchedule`: a `torch.optim.lr_scheduler` as a function from step to learning rates.

The learning rate is an input of a captured step, so a schedule has to give its value for any step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from sbp_core.errors import SbpValueError
from sbp_torch.update_options import SETTINGS


class _Still(torch.optim.Optimizer):
    """An optimizer with the settings of another optimizer, without its parameters and updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [
            {**group, "params": [torch.nn.Parameter(torch.zeros(()))]}
            for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # torch overloads it
        """Do nothing."""


class TorchSchedule:
    """The settings of an optimizer at any step, according to a scheduler of PyTorch.

    The optimizer itself is unchanged.

    Args:
        optimizer: The optimizer with the initial settings.
        make: Returns a scheduler of its argument, an optimizer, such as
            `lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=100)`.
        scheduled: Settings in addition to `lr` that are inputs of the step
            (`UpdateOptions.scheduled`).

    Raises:
        SbpValueError: the scheduler needs more than the number of the step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[[torch.optim.Optimizer], LRScheduler],
        scheduled: tuple[str, ...] = (),
    ) -> None:
        self._still = _Still(optimizer)
        self._scheduler = make(self._still)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise SbpValueError(
                "ReduceLROnPlateau needs the loss of each epoch",
                accepted="schedulers that need only the number of the step",
            )
        self._scheduled = ("lr", *scheduled)
        self._known = [self._values()]

    def __call__(self, step: int) -> dict[str, float]:
        """Return the scalar inputs of a step by name: `lr`, or `lr.0`, `lr.1`, ...

        Args:
            step: Number of the step, from 0; in any order.
        """
        if step < 0:
            raise SbpValueError(f"step {step}", accepted="an integer >= 0")
        while len(self._known) <= step:
            self._still.step()
            self._scheduler.step()
            self._known.append(self._values())
        return dict(self._known[step])

    def _values(self) -> dict[str, float]:
        found: dict[str, float] = {}
        groups = self._still.param_groups
        for index, group in enumerate(groups):
            suffix = "" if len(groups) == 1 else f".{index}"
            for setting in self._scheduled:
                key, place = SETTINGS[setting]
                if key in group:
                    value = group[key]
                    found[f"{setting}{suffix}"] = float(value if place is None else value[place])
        return found
