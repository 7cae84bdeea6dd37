"""Find changes of an optimizer's parameter groups and settings since its step was captured.

`Guard` (in `program`) checks this before each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sbp_torch.guards.reads import Reads
from sbp_torch.guards.recorded_values import ANEW, NOTHING, ChangedValue, is_same, short
from sbp_torch.optim.combined import members
from sbp_torch.update_options import SETTINGS, UpdateOptions

#: Attributes of optimizers that other code compares, or that PyTorch's schedulers change.
OF_OPTIMIZERS = {"defaults", "param_groups", "state", "step"}


class OptimizerGuard:
    """Compares the parameter groups of an optimizer with those at the last `renew`.

    Learning rates, and what `UpdateOptions.scheduled` names, are inputs of the step and may change.

    Args:
        model: The model, for the names of the parameters.
        optimizer: The optimizer of these parameters.
        update: The options that name the settings which are inputs of the step.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, update: UpdateOptions
    ) -> None:
        self._model, self._optimizer = model, optimizer
        #: Setting that is an input, at least in part -> positions of its numbers; None: all of it.
        self._inputs: dict[str, set[int | None]] = {}
        for name in ("lr", *update.scheduled):
            key, place = SETTINGS[name]
            self._inputs.setdefault(key, set()).add(place)

    def renew(self) -> None:
        """Take the present groups as the reference."""
        self._names = {id(one): name for name, one in self._model.named_parameters()}
        self._read: list[set[str]] = []
        self._kept: list[list[dict[str, Any]]] = []
        self._parts = list(members(self._optimizer))
        for one in self._parts:
            reads = Reads()
            for _ in reads.add_class(type(one)):
                pass
            keys = {key for group in one.param_groups for key in group}
            defaults = getattr(one, "defaults", {})  # a wrapper may not call Optimizer.__init__
            own = {key for key in keys if key in defaults or reads.may_read(key)}
            self._read.append((own | (reads.names - keys)) - {"params"})
            self._kept.append(
                [{**group, "params": [*group["params"]]} for group in one.param_groups]
            )
        self._members = [[*map(id, group["params"])] for group in self._groups()]
        self._keys = [
            [sorted(read & group.keys()) for group in kept]
            for read, kept in zip(self._read, self._kept, strict=True)
        ]

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for one in self._parts for group in one.param_groups)

    def holds(self) -> bool:
        """Whether nothing has changed since `renew`."""
        if [[*map(id, group["params"])] for group in self._groups()] != self._members:
            return False
        for one, keys, kept in zip(self._parts, self._keys, self._kept, strict=True):
            for group, read, before in zip(one.param_groups, keys, kept, strict=True):
                if len(group) != len(before) or any(
                    self._fixed_part(k, group[k]) != self._fixed_part(k, before[k]) for k in read
                ):
                    return False
        return True

    def changes(self) -> list[ChangedValue]:
        """Return the changes since `renew` that may matter to the step."""
        found: list[ChangedValue] = []
        number = 0
        for one, read, kept in zip(self._parts, self._read, self._kept, strict=True):
            if len(one.param_groups) != len(kept):
                what = f"the optimizer has {len(one.param_groups)} parameter groups, and had "
                what += f"{len(kept)} when the step was captured"
                todo = f"give it all groups before parallelize, with lr=0 until then; or {ANEW}"
                found.append(ChangedValue(what=what, todo=todo))
                continue
            for group, before in zip(one.param_groups, kept, strict=True):
                found += self._of_group(number, group, before, read)
                number += 1
        return found

    def _of_group(
        self, number: int, group: dict[str, Any], before: dict[str, Any], read: set[str]
    ) -> Iterator[ChangedValue]:
        now, was = (
            [self._names.get(id(one), "a parameter of no model") for one in of["params"]]
            for of in (group, before)
        )
        if now != was:
            new = [name for name in now if name not in was]
            gone = [name for name in was if name not in now]
            parts = [f"{', '.join(map(repr, new))} that it did not have"] * bool(new)
            parts += [f"no {', '.join(map(repr, gone))}, which it had"] * bool(gone)
            told = " and ".join(parts) or "the parameters in another order than"
            yield ChangedValue(
                what=f"parameter group {number} has {told} when the step was captured",
                where="the optimizer",
            )
        for key in dict.fromkeys((*before, *group)):
            pair = group.get(key, NOTHING), before.get(key, NOTHING)
            if key not in read or is_same(*(self._fixed_part(key, one) for one in pair[::-1])):
                continue
            names = [one for one, (setting, _) in SETTINGS.items() if setting == key]
            told = ", ".join(map(repr, names))
            yield ChangedValue(
                what=f"{key} of parameter group {number} is {short(pair[0])}, and was "
                f"{short(pair[1])} when the step was captured",
                where="the optimizer",
                todo=f"pass update=UpdateOptions(scheduled=({told},)) to parallelize, which makes "
                "it an input of the step"
                if names
                else ANEW,
            )
        for key in group.keys() - before.keys():
            before[key] = group[key]  # such as `initial_lr`, which schedulers add

    def _fixed_part(self, key: str, value: Any) -> Any:
        """Return the part of a setting that is fixed in the step: all but the inputs."""
        places = self._inputs.get(key)
        if not places or not isinstance(value, tuple | list):
            return value if not places else None
        return [one for place, one in enumerate(value) if place not in places]
