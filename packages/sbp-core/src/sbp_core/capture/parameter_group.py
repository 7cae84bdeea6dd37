"""One parameter group of an optimizer: its states, its scalar inputs, and how its parameters move.

The user's own code is run where it can be traced (see `restated` for the rest), with its choice of
implementation (`foreach`, `capturable`) set to the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sbp_core._torch_compat import compiling
from sbp_core.capture.first_states import PLAIN, FirstStates, Number, plain_step, twin_of
from sbp_core.capture.restated import Move, counts_for_first_step, move_of
from sbp_core.errors import CaptureError
from sbp_core.update_options import SETTINGS, UpdateOptions

#: Optimizers whose plain code branches on host numbers: they run with steps as tensors.
_TENSOR_STEPS = (torch.optim.ASGD, torch.optim.Rprop)


class _Scheduled(torch.SymFloat):
    """A setting that is a scalar input. Optimizers may ask whether it is zero: it may be not."""

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
        if SETTINGS[setting][0] in settings
    }


def _setting(settings: Mapping[str, Any], setting: str) -> float:
    key, place = SETTINGS[setting]
    value = settings[key]
    return float(value if place is None else value[place])


class ParameterGroup:
    """A group of an optimizer, as a function of its states.

    Args:
        optimizer: Whose group it is.
        settings: The group as the optimizer holds it.
        parameters: Its parameters by name.
        suffix: Of the names of its scalar inputs.
        options: See `UpdateOptions`.

    Raises:
        CaptureError: the states before the first step are not known, or steps may be skipped and
            the optimizer cannot.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        suffix: str,
        options: UpdateOptions,
    ) -> None:
        self.optimizer, self.settings = optimizer, dict(settings)
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.skips = options.loss_scaling is not None
        #: Names of scalar inputs by setting.
        self.scalars = scalar_names(self.settings, suffix, options)
        self._first_states = FirstStates(optimizer, self.settings)
        #: Python numbers among the states: what they are, and what every step adds to them.
        self.numbers: dict[str, dict[str, tuple[Number, Number]]] = {}
        #: States by parameter and key.
        self.states = {name: self._tensors(name, p) for name, p in self.parameters.items()}
        stepped = all(optimizer.state.get(p) for p in self.parameters.values())
        fused = options.fused if options.fused is not None else bool(self.settings.get("fused"))
        self.move: Move | None = move_of(
            optimizer, self.settings, fused=fused, skips=self.skips, stepped=stepped
        )
        if counts_for_first_step(self.move):
            for states in self.states.values():
                states["step"] = torch.zeros(())
        self._check_skips()

    def _tensors(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter: those it has, else those before the first step."""
        made = self.optimizer.state.get(parameter) or {}
        tensors = {key: value for key, value in made.items() if isinstance(value, Tensor)}
        if not made or len(tensors) < len(made):
            first = self._first_states.of(parameter)
            tensors = {**first.tensors, **tensors}
            numbers = {k: (made.get(k, start), by) for k, (start, by) in first.numbers.items()}
            self.numbers[name] = numbers
            for key, (number, by) in numbers.items():
                if by:  # a counter: a state
                    tensors[key] = torch.tensor(float(number), dtype=torch.float64)
        return dict(sorted(tensors.items()))

    def _check_skips(self) -> None:
        counts = any("step" in states for states in self.states.values())
        counts = counts or any(by for of in self.numbers.values() for _, by in of.values())
        if self.skips and counts and self.move is None and "capturable" not in self.settings:
            raise CaptureError(
                f"{type(self.optimizer).__name__} reads the number of the step on the host, where "
                "nobody knows whether an overflow skips it",
                accepted="optimizers of torch.optim and sbp_core.optim under loss scaling",
                todo="train in bfloat16, which needs no loss scaling",
            )

    def scalar_values(self) -> dict[str, float]:
        """Return what the scalar inputs are now, by name."""
        return {name: _setting(self.settings, key) for key, name in self.scalars.items()}

    def step(
        self,
        held: MutableMapping[str, Tensor],
        grads: Mapping[str, Tensor],
        states: MutableMapping[str, Tensor],
        scalars: Mapping[str, Tensor],
    ) -> None:
        """Move those parameters that have a gradient. See `Update.__call__`."""
        settings = {
            **self.settings,
            **{key: value for key, value in PLAIN.items() if key in self.settings},
            **self._inputs(scalars),
        }
        if self.move is None:
            self._run(settings, held, grads, states)
            return
        for name, kept in self.states.items():
            if name not in grads:
                continue
            own = {key: states[f"{name}.{key}"] for key in kept}
            step: Any = None
            if "step" in own:
                states[f"{name}.step"] = own["step"] = own["step"] + 1
                step = own["step"].double() if self.skips else own["step"].item()
            moved = self.move(settings, held[name], grads[name], own, step)
            held[name] = moved.parameter.to(held[name].dtype)
            for key, value in moved.states.items():
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

    def _run(
        self,
        settings: dict[str, Any],
        held: MutableMapping[str, Tensor],
        grads: Mapping[str, Tensor],
        states: MutableMapping[str, Tensor],
    ) -> None:
        """Let the optimizer's own code step, on a twin that holds the traced tensors."""
        twin = twin_of(self.optimizer)
        tensor_steps = self.skips or type(self.optimizer) in _TENSOR_STEPS
        if tensor_steps and "capturable" in settings:
            settings = {**settings, "capturable": True}
        for name, kept in self.states.items():
            member = held[name]
            member.grad = grads.get(name)
            own: dict[str, Any] = {key: states[f"{name}.{key}"] for key in kept}
            if tensor_steps and "step" in own:  # as exact as numbers on the host
                own["step"] = own["step"].double()
            for key, (number, by) in self.numbers.get(name, {}).items():
                own[key] = number
                if by:
                    count = states[f"{name}.{key}"] = states[f"{name}.{key}"] + by
                    own[key] = count.item() - by
            twin.state[member] = own
        members = [held[name] for name in self.states]
        twin.param_groups.append({**settings, "params": members})
        with compiling() if tensor_steps else nullcontext():
            plain_step(self.optimizer)(twin)
        for name, member in zip(self.states, members, strict=True):
            numbers = self.numbers.get(name, {})
            for key, value in twin.state[member].items():
                full = f"{name}.{key}"
                if key in numbers:
                    continue
                if full not in states:
                    raise CaptureError(
                        f"{type(self.optimizer).__name__} makes the state {key!r} in a later step",
                        accepted="optimizers that make all states in their first step",
                        todo="take the steps before capture",
                    )
                states[full] = value.to(states[full].dtype)
