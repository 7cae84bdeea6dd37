"""Compute, before each step, its learning rates and other scheduled settings of the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import SbpValueError
from sbp_torch.graph_capture import UpdateOptions, current_scalars

logger = logging.getLogger(__name__)

#: Entries of a parameter group that describe the model; checkpoints do not have them.
_OF_MODEL = ("params", "param_names")


class UpdateScalars:
    """Computes the scalars of each step from given values and from the optimizer's groups.

    Args:
        optimizer: The optimizer, whose groups schedulers may change.
        update: Defines which settings of the groups are inputs of a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, update: UpdateOptions) -> None:
        self._optimizer, self._update = optimizer, update

    def now(self, given: Mapping[str, float]) -> dict[str, float]:
        """Return every scalar of the update, by name.

        Args:
            given: Values for this step. `lr` is for all groups, `lr.1` for one group.

        Raises:
            SbpValueError: a given scalar does not exist, or is not a number.
        """
        try:
            found = current_scalars(self._optimizer, self._update)
        except (TypeError, ValueError) as error:
            rates = [group.get("lr") for group in self._optimizer.param_groups]
            raise SbpValueError(
                f"a setting of the optimizer's groups is no number: {error}",
                where=f"the optimizer, whose groups have lr={rates}",
                accepted="numbers",
            ) from error
        for name, value in given.items():
            meant = [own for own in found if own == name or own.rpartition(".")[0] == name]
            if not meant:
                raise SbpValueError(
                    f"the update has no scalar {name!r}",
                    accepted=", ".join(found),
                    todo="weight_decay, momentum, beta1 and beta2 are scalars if they are named in "
                    "update=UpdateOptions(scheduled=(...))",
                )
            found |= dict.fromkeys(meant, _as_number(name, value))
        return found


def _as_number(name: str, value: object) -> float:
    if not isinstance(value, str):
        with suppress(TypeError, ValueError):
            return float(value)  # type: ignore[arg-type] # refused below if it is not a number
    raise SbpValueError(
        f"{name}={value!r} is of type {type(value).__name__}",
        where="the settings of the update that are given to a step",
        accepted="a number",
    )


def saved_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of parameter groups that JSON can represent."""
    found = []
    for group in groups:
        values = {key: _plain(value) for key, value in group.items() if key not in _OF_MODEL}
        found.append({key: value for key, value in values.items() if _is_json(value)})
    return found


def restore_groups(groups: Sequence[dict[str, Any]], saved: Any, where: str) -> None:
    """Set the settings of parameter groups to those that `saved_groups` returned.

    Args:
        groups: The groups. If their number differs, their settings stay, with a warning.
        saved: The saved settings; None if the checkpoint has none.
        where: The name of the checkpoint, for messages.
    """
    if not isinstance(saved, list):
        return
    if len(saved) != len(groups):
        logger.warning(
            "%s has the settings of %d parameter groups, and there are %d: their settings "
            "stay as they are",
            where,
            len(saved),
            len(groups),
        )
        return
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            if key in _OF_MODEL:
                continue
            before = group.get(key)
            if isinstance(before, Tensor):
                before.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return [*map(_plain, value)] if isinstance(value, tuple | list) else value


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return isfinite(value)
    return value is None or isinstance(value, bool | int | str)
