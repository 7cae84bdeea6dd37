"""One parameter group of an optimizer: its states, its scalar inputs, how its parameters change.

The optimizer's own code is run where it can be traced (`user_optimizer`), and a functional form of
it elsewhere (`functional_optimizers`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError
from sbp_core.runtime import Number
from sbp_torch.capture.functional_optimizers import (
    UpdateFunction,
    functional_update,
    needs_step_counter,
)
from sbp_torch.capture.fused_kernels import takes_kernel
from sbp_torch.capture.optimizer_clones import PLAIN, is_known, kind_of
from sbp_torch.capture.optimizer_states import InitialStateProbe
from sbp_torch.update_options import SETTINGS, UpdateOptions


class _Scheduled(torch.SymFloat):
    """A setting that is a scalar input.

    Optimizers ask whether it is zero, to leave work out. No trace can tell, so that the answer is
    that it is not: the work on zero is then done, and comes to the same.
    """

    def __ne__(self, other: object) -> bool:
        return True if other == 0 else bool(super().__ne__(other))

    def __gt__(self, other: float) -> bool:
        return True if other == 0 else bool(super().__gt__(other))

    __hash__ = torch.SymFloat.__hash__


def scalar_names(
    settings: Mapping[str, Any], suffix: str, options: UpdateOptions
) -> dict[str, str]:
    """Return the names of the scalar inputs of a group, by setting."""
    return {
        setting: f"{setting}{suffix}"
        for setting in ("lr", *options.scheduled)
        if settings.get(SETTINGS[setting][0]) is not None
    }


def setting_of(settings: Mapping[str, Any], setting: str) -> float:
    """Return what a group says of a setting that is a scalar input."""
    key, place = SETTINGS[setting]
    value = settings[key]
    return float(value if place is None else value[place])


class ParameterGroup:
    """A group of an optimizer, as a function of its states.

    Args:
        optimizer: Whose group it is.
        index: Which of its groups.
        parameters: Its parameters by name.
        suffix: Of the names of its scalar inputs.
        options: See `UpdateOptions`.
        device: Kind of device that the step will run on; None if nothing will.

    Raises:
        CaptureError: the states before the first step are not known, or steps may be skipped and
            the optimizer cannot.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        parameters: Mapping[str, Tensor],
        suffix: str,
        options: UpdateOptions,
        device: str | None = None,
    ) -> None:
        self.optimizer, self.settings = optimizer, dict(optimizer.param_groups[index])
        self.all_names = list(parameters)
        #: Those that are trained.
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.may_skip = options.loss_scaling is not None
        #: Names of scalar inputs by setting.
        self.scalars = scalar_names(self.settings, suffix, options)
        self._probe = InitialStateProbe(optimizer, index)
        #: Python numbers among the states: what they are, and what every step adds to them.
        self.numbers: dict[str, dict[str, tuple[Number, Number]]] = {}
        #: States, by parameter, that begin as copies of it.
        self.copies: dict[str, frozenset[str]] = {}
        #: States by parameter and key.
        self.states = {name: self._tensors(name, p) for name, p in self.parameters.items()}
        #: What updates the parameters that the optimizer's own code does not.
        self.functional: dict[str, UpdateFunction] = {}
        for name, parameter in self.parameters.items():
            update = functional_update(
                optimizer,
                self.settings,
                fused=takes_kernel(optimizer, self.settings, options, parameter.dtype, device),
                may_skip=self.may_skip,
                stepped=bool(optimizer.state.get(parameter)),
            )
            if update is not None:
                self.functional[name] = update
            if needs_step_counter(update):
                self.states[name]["step"] = torch.zeros(())
        self._check_skips()

    def _tensors(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter: those it has, else those before the first step."""
        made = self.optimizer.state.get(parameter) or {}
        if any(isinstance(value, Tensor) and value.is_meta for value in made.values()):
            made = {}  # made with the optimizer, of a parameter without values: they have none
        if kind_of(self.optimizer) is torch.optim.SGD and not self.settings["momentum"]:
            made = {}  # what it has kept from when it had a momentum, it leaves alone
        tensors = {key: value for key, value in made.items() if isinstance(value, Tensor)}
        if not made or len(tensors) < len(made) or self._may_be_numbers(tensors):
            if made:  # it has stepped: only the amounts are unknown
                counted = self._probe.numbers_of(parameter)
            else:
                initial = self._probe.of(parameter)
                tensors, counted = dict(initial.tensors), initial.numbers
                self.copies[name] = initial.copies
            numbers = {k: (made.get(k, start), by) for k, (start, by) in counted.items()}
            self.numbers[name] = numbers
            for key, (number, by) in numbers.items():
                if by:  # a counter: a state
                    tensors[key] = torch.tensor(float(number), dtype=torch.float64)
        return dict(sorted(tensors.items()))

    def _may_be_numbers(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether some may be Python numbers, which training shows as tensors in the optimizer."""
        return not is_known(self.optimizer) and any(
            not one.dim() and one.dtype == torch.float64 for one in tensors.values()
        )

    def _check_skips(self) -> None:
        traced = [name for name in self.parameters if name not in self.functional]
        counts = any("step" in self.states[name] for name in traced)
        counts = counts or any(by for of in self.numbers.values() for _, by in of.values())
        if self.may_skip and counts and "capturable" not in self.settings:
            raise CaptureError(
                f"{type(self.optimizer).__name__} reads the number of the step on the host, where "
                "nobody knows whether an overflow skips it",
                accepted="optimizers of torch.optim and sbp_torch.optim under loss scaling",
                todo="train in bfloat16, which needs no loss scaling",
            )

    def scalar_values(self) -> dict[str, float]:
        """Return what the scalar inputs are now, by name."""
        return {name: setting_of(self.settings, key) for key, name in self.scalars.items()}

    def plain(self, scalars: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the settings of a step: the plain implementation, and scalar inputs."""
        return {
            **self.settings,
            **{key: value for key, value in PLAIN.items() if key in self.settings},
            **self._inputs(scalars),
        }

    def update(
        self,
        parameters: MutableMapping[str, Tensor],
        grads: Mapping[str, Tensor],
        states: MutableMapping[str, Tensor],
        scalars: Mapping[str, Tensor],
    ) -> None:
        """Update the parameters of `functional` that have a gradient. See `Update.__call__`."""
        settings = self.plain(scalars) if self.functional else {}
        for name, update in self.functional.items():
            if name not in grads:
                continue
            own = {key: states[f"{name}.{key}"] for key in self.states[name]}
            step: Any = None
            if "step" in own:
                states[f"{name}.step"] = own["step"] = own["step"] + 1
                step = own["step"].double() if self.may_skip else own["step"].item()
            result = update(settings, parameters[name], grads[name], own, step)
            parameters[name] = result.parameter.to(parameters[name].dtype)
            for key, value in result.states.items():
                states[f"{name}.{key}"] = value.to(own[key].dtype)

    def _inputs(self, scalars: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the settings that are scalar inputs."""
        found: dict[str, Any] = {}
        for setting, name in self.scalars.items():
            key, place = SETTINGS[setting]
            number: Any = scalars[name].item()
            if setting != "lr" and isinstance(number, torch.SymFloat):
                number = _Scheduled(number.node)  # type: ignore[no-untyped-call] # torch's
            if place is None:
                found[key] = number
            else:
                old = found.get(key, self.settings[key])
                found[key] = tuple(number if at == place else one for at, one in enumerate(old))
        return found
