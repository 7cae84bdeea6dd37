"""The states of an optimizer before its first step, without taking one on the model.

Optimizers make their states in their first step, by `state[key] = value`. We let them take that
step on stand-ins: small ones that show which number a state is filled with, and one without data
that shows its shape. `differential_validation` checks that it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError
from sbp_torch._torch_optim_compat import constructed_states
from sbp_torch.capture.optimizer_clones import (
    PLAIN,
    SMALL,
    is_known,
    kind_of,
    plain_step,
    settings_of,
    small_shape,
    twin_of,
)
from sbp_torch.capture.sources import user_frame

_VELOCITY = "momentum_buffer"

#: Steps of a trial: the third shows whether a number grows by the same amount again.
_STEPS = 3

Number = int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstState:
    """What an optimizer keeps for one parameter before its first step.

    Args:
        tensors: By key.
        numbers: Python numbers by key: the first value, and what each step adds to it.
    """

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, tuple[Number, Number]]


class _Recorder(dict[str, Any]):
    """The states of a parameter; remembers what each key was first set to."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """What an optimizer keeps of a stand-in.

    Args:
        first: What each key was first set to.
        after: What is no tensor after each step, by key; from the step on that makes it.
    """

    first: Mapping[str, Any]
    after: Mapping[str, list[Any]] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {key: value for key, value in self.first.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What the states of all parameters of one shape and dtype begin with.

    Args:
        fills: The number that each tensor is filled with, by key.
        shapes: Tensors without data, by key, or with data if the optimizer looks at it.
        numbers: As in `FirstState`.
    """

    fills: Mapping[str, Number]
    shapes: Mapping[str, Tensor]
    numbers: Mapping[str, tuple[Number, Number]]


class FirstStates:
    """The states of parameters that an optimizer has not moved yet.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        index: Which of its groups holds the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self.optimizer, self.index = optimizer, index
        self.group = optimizer.param_groups[index]
        self._known: dict[object, _Common | None] = {}

    def of(self, parameter: Tensor) -> FirstState:
        """Return the states of a parameter.

        Args:
            parameter: Any shape; only read.

        Raises:
            CaptureError: the states depend on the first gradient, or are no tensors and counters;
                or a step on a stand-in fails.
        """
        if kind_of(self.optimizer) is torch.optim.SGD:
            zero = torch.zeros_like(parameter, requires_grad=False)
            return FirstState(
                tensors={_VELOCITY: zero} if self.group["momentum"] else {}, numbers={}
            )
        looks = (tuple(parameter.shape), parameter.dtype, parameter.device)
        if looks not in self._known:
            self._known[looks] = self._common(parameter)
        common = self._known[looks]
        if common is None:  # such as a copy of the parameter: only its own value tells
            tried = self._trial(parameter, 0.5)
            return FirstState(tensors=tried.tensors, numbers=self._counters(tried))
        tensors = {
            key: torch.full(
                common.shapes[key].shape,
                fill,
                dtype=common.shapes[key].dtype,
                device="cpu" if common.shapes[key].device.type == "cpu" else parameter.device,
            )
            for key, fill in common.fills.items()
        }
        return FirstState(tensors=tensors, numbers=common.numbers)

    def numbers_of(self, parameter: Tensor) -> Mapping[str, tuple[Number, Number]]:
        """Return the Python numbers of a parameter, whatever its tensors begin with."""
        return self._counters(self._trial(_stand_in(parameter), 0.5))

    def _common(self, parameter: Tensor) -> _Common | None:
        """Return what is common to all parameters like this one; None if nothing is."""
        small = _stand_in(parameter)
        tried = self._trial(small, 0.5)
        self._check_gradient_free(tried, self._trial(small, -2.0))
        other = self._trial(_stand_in(parameter, SMALL + 1) + 0.25, 0.5)
        shapes = self._shapes(parameter)
        if not tried.first.keys() == other.first.keys() == shapes.keys():
            return None  # which states there are goes by the shape
        fills: dict[str, Number] = {}
        for key, value in tried.tensors.items():
            if self._is_velocity(key):
                fills[key] = 0.0
                continue
            one, moved = value.flatten()[:1], other.first[key]
            if not value.numel() or not (value == one).all() or not (moved == one).all():
                return None
            fills[key] = one.item()
        return _Common(fills=fills, shapes=shapes, numbers=self._counters(tried))

    def _shapes(self, parameter: Tensor) -> Mapping[str, Any]:
        meta = torch.empty_like(parameter, device="meta")
        try:
            return self._stepped(meta, 0.5).first
        except Exception:  # it looks at values, in whichever way; deferred ones have none
            real = torch.zeros_like(parameter, device="cpu") if parameter.is_meta else parameter
            return self._trial(real, 0.5).first

    def _trial(self, value: Tensor, gradient: float) -> _Trial:
        """Take steps on a stand-in; return its states.

        Raises:
            CaptureError: a step fails.
        """
        try:
            return self._stepped(value, gradient)
        except CaptureError:
            raise
        except Exception as error:
            raise failed_step(self.optimizer, value, error) from error

    def _stepped(self, value: Tensor, gradient: float) -> _Trial:
        twin = twin_of(self.optimizer, apart=True)
        recorder = _Recorder()
        stand_in = value.detach().clone().requires_grad_()
        twin.state[stand_in] = recorder
        members = [stand_in]
        for index, group in enumerate(self.optimizer.param_groups):
            plain = {key: value for key, value in PLAIN.items() if key in group}
            if index == self.index:
                recorder.update(constructed_states(self.optimizer, group, stand_in.detach()))
                twin.param_groups.append({**settings_of(group), **plain, "params": [stand_in]})
            elif not is_known(self.optimizer):  # its code may look at all groups
                others = [_stand_in(p).to(value.device) for p in group["params"][:1]]
                members += [other.requires_grad_() for other in others]
                twin.param_groups.append({**settings_of(group), **plain, "params": others})
        step, after = plain_step(self.optimizer), defaultdict[str, list[Any]](list)
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            for _ in range(_STEPS):
                for member in members:
                    member.grad = torch.full_like(member, gradient)
                step(twin)
                for key, kept in twin.state[stand_in].items():
                    if not isinstance(kept, Tensor):
                        after[key].append(kept)
        return _Trial(first=recorder.first, after=after)

    def _is_velocity(self, key: str) -> bool:
        """Whether a state is the velocity of SGD: made of the first gradient, as if from zero."""
        return key == _VELOCITY and isinstance(self.optimizer, torch.optim.SGD)

    def _check_gradient_free(self, left: _Trial, right: _Trial) -> None:
        for key, value in left.first.items():
            if self._is_velocity(key):
                continue
            other = right.first.get(key)
            if isinstance(value, Tensor) and isinstance(other, Tensor):
                same = torch.equal(value, other)
            else:
                same = value is other or value == other
            if not same or value is None:
                raise CaptureError(
                    f"the state {key!r} of {self._name} is made of the first gradient",
                    accepted="states that are the same before any first step",
                    todo="take one step with it before capture",
                )

    def _counters(self, tried: _Trial) -> dict[str, tuple[Number, Number]]:
        """Return the numbers among the states: before the first step, and what each step adds."""
        found: dict[str, tuple[Number, Number]] = {}
        for key, values in tried.after.items():
            if any(not isinstance(value, int | float) for value in values):
                kinds = sorted({type(value).__name__ for value in values})
                raise CaptureError(
                    f"the state {key!r} of {self._name} is {' or '.join(kinds)}",
                    accepted="tensors and counters",
                    todo="keep settings in the groups or in attributes",
                )
            by = values[1] - values[0] if len(values) > 1 else 0
            if any(value != values[0] + index * by for index, value in enumerate(values)):
                raise CaptureError(
                    f"the state {key!r} of {self._name} is a Python number that goes "
                    f"{', '.join(map(repr, values))}",
                    accepted="Python numbers that each step adds the same amount to",
                    todo="keep a 0-d tensor, or compute it from the number of the step",
                )
            found[key] = (values[0] - by, by)
        return found

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__


def failed_step(optimizer: torch.optim.Optimizer, value: Tensor, error: Exception) -> CaptureError:
    """Return the error for an optimizer that cannot step on a stand-in."""
    name = type(optimizer).__name__
    if isinstance(error, TypeError) and "closure" in str(error):
        return CaptureError(
            f"{name}.step cannot be called without a closure: {error}",
            accepted="optimizers that step from gradients alone",
        )
    return CaptureError(
        f"{name} cannot step on a parameter of shape {tuple(value.shape)} and {value.dtype}: "
        f"{type(error).__name__}: {error}",
        where=user_frame(error),
        accepted="optimizers that step from dense gradients, whatever the shapes",
        todo="keep what a step needs in self.state[parameter], in the groups, or in constants",
    )


def _stand_in(parameter: Tensor, most: int = SMALL) -> Tensor:
    """Return a small parameter of different numbers."""
    shape = torch.Size(small_shape(parameter.shape, most))
    if not parameter.numel():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    period = torch.linspace(-1.0, 1.0, 7, dtype=parameter.dtype)
    return period.repeat(shape.numel() // 7 + 1)[: shape.numel()].reshape(shape)
