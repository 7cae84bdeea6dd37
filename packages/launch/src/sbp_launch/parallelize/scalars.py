"""The settings of the update that change from step to step: rates, and what is scheduled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sbp_core.errors import SbpValueError
from sbp_torch.capture import UpdateOptions, current_scalars

#: Settings of parameter groups that are inputs of a step only if `UpdateOptions.scheduled` says so.
_CAPTURED = ("weight_decay", "momentum", "betas")


class UpdateScalars:
    """Says the scalars of each step: those that are given, and what the optimizer says now.

    Args:
        optimizer: Whose groups schedulers may change.
        update: Says which of their settings are inputs of a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, update: UpdateOptions) -> None:
        self._optimizer, self._update = optimizer, update
        self._captured = self._constants()

    def now(self, given: Mapping[str, float]) -> dict[str, float]:
        """Return every scalar of the update, by name.

        Args:
            given: Values for this step. `lr` is that of all groups, `lr.1` that of one.

        Raises:
            SbpValueError: one is given that there is not; or a setting of a group has changed that
                is no input of the step.
        """
        found = current_scalars(self._optimizer, self._update)
        for name, value in given.items():
            meant = [own for own in found if own == name or own.rpartition(".")[0] == name]
            if not meant:
                raise SbpValueError(
                    f"the update has no scalar {name!r}",
                    accepted=", ".join(found),
                    todo="weight_decay, momentum, beta1 and beta2 are scalars if they are named in "
                    "update=UpdateOptions(scheduled=(...))",
                )
            found |= dict.fromkeys(meant, float(value))
        self._refuse_changes()
        return found

    def _constants(self) -> list[dict[str, Any]]:
        """Return, of each group, the settings that the captured step has as constants."""
        scheduled = {"betas" if one.startswith("beta") else one for one in self._update.scheduled}
        kept = [key for key in _CAPTURED if key not in scheduled]
        return [
            {key: group[key] for key in kept if key in group}
            for group in self._optimizer.param_groups
        ]

    def _refuse_changes(self) -> None:
        """Refuse settings that have changed and would be ignored."""
        now = self._constants()
        if now == self._captured:
            return
        for number, (before, after) in enumerate(zip(self._captured, now, strict=True)):
            for key in before:
                if before[key] == after[key]:
                    continue
                names = "'beta1', 'beta2'" if key == "betas" else f"{key!r}"
                raise SbpValueError(
                    f"{key} of parameter group {number} is {after[key]} now, and was "
                    f"{before[key]} when the step was captured",
                    where="the optimizer",
                    accepted="a change of lr, and of what is scheduled",
                    todo=f"pass update=UpdateOptions(scheduled=({names},)) to parallelize",
                )
