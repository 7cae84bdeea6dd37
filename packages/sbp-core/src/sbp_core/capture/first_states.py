"""The states of an optimizer before its first step, without taking one on the model.

Optimizers make their states in their first step, by `state[key] = value`. We let them take that
step on stand-ins: a small one that shows which number a state is filled with, and one without data
that shows its shape.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError

#: Settings of groups that choose between implementations of one update: we take the plain one.
PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}

#: Extent of the dims of the small stand-in, at most.
_SMALL = 3

_VELOCITY = "momentum_buffer"

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


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """Return `step` of an optimizer's class without hooks and profiler."""
    step: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(type(optimizer).step)
    return step


def twin_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same settings, without parameters and states."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
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
        group: Its group that holds the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        self.optimizer, self.group = optimizer, group
        self._known: dict[object, _Kind | None] = {}

    def of(self, parameter: Tensor) -> FirstState:
        """Return the states of a parameter.

        Args:
            parameter: Any shape; only read.

        Raises:
            CaptureError: the states depend on the first gradient, or are no tensors and counters.
        """
        if type(self.optimizer) is torch.optim.SGD:
            zero = torch.zeros_like(parameter, requires_grad=False)
            return FirstState(
                tensors={_VELOCITY: zero} if self.group["momentum"] else {}, numbers={}
            )
        looks = (tuple(parameter.shape), parameter.dtype, parameter.device)
        if looks not in self._known:
            self._known[looks] = self._kind(parameter)
        kind = self._known[looks]
        if kind is None:  # such as a copy of the parameter: only its own value tells
            tried = _trial(self.optimizer, self.group, parameter, 0.5)
            tensors = {k: v for k, v in tried.first.items() if isinstance(v, Tensor)}
            return FirstState(tensors=tensors, numbers=_counters(self.optimizer, tried))
        tensors = {
            key: torch.full(
                kind.shapes[key].shape,
                fill,
                dtype=kind.shapes[key].dtype,
                device="cpu" if kind.shapes[key].device.type == "cpu" else parameter.device,
            )
            for key, fill in kind.fills.items()
        }
        return FirstState(tensors=tensors, numbers=kind.numbers)

    def _kind(self, parameter: Tensor) -> _Kind | None:
        """Return what is common to all parameters like this one; None if nothing is."""
        small = _stand_in(parameter)
        tried = _trial(self.optimizer, self.group, small, 0.5)
        _check_gradient_free(self.optimizer, tried, _trial(self.optimizer, self.group, small, -2.0))
        moved = _trial(self.optimizer, self.group, small + 0.25, 0.5).first
        fills: dict[str, Number] = {}
        for key, value in tried.first.items():
            if _is_velocity(self.optimizer, key):
                fills[key] = 0.0
            elif isinstance(value, Tensor):
                one = value.flatten()[:1]
                if not value.numel() or not (value == one).all() or not value.equal(moved[key]):
                    return None
                fills[key] = one.item()
        shapes = self._shapes(parameter) if fills else {}
        return _Kind(fills=fills, shapes=shapes, numbers=_counters(self.optimizer, tried))

    def _shapes(self, parameter: Tensor) -> Mapping[str, Tensor]:
        try:
            meta = torch.empty_like(parameter, device="meta")
            return _trial(self.optimizer, self.group, meta, 0.5).first
        except (RuntimeError, NotImplementedError):  # it looks at values; deferred ones have none
            real = torch.zeros_like(parameter, device="cpu") if parameter.is_meta else parameter
            return _trial(self.optimizer, self.group, real, 0.5).first


def _is_velocity(optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Whether a state is the velocity of SGD: made of the first gradient, as if from zero."""
    return key == _VELOCITY and isinstance(optimizer, torch.optim.SGD)


def _stand_in(parameter: Tensor) -> Tensor:
    """Return a small parameter of different numbers."""
    if not parameter.numel():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    small = torch.linspace(-1.0, 1.0, 7, dtype=parameter.dtype).repeat(_SMALL ** parameter.dim())
    shape = torch.Size(min(extent, _SMALL) for extent in parameter.shape)
    return small[: shape.numel()].reshape(shape)


def _trial(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], value: Tensor, gradient: float
) -> _Recorder:
    """Take two steps on a stand-in; return its states."""
    twin = twin_of(optimizer)
    recorder = _Recorder()
    stand_in = value.detach().clone().requires_grad_()
    twin.state[stand_in] = recorder
    twin.param_groups.append(
        {**group, **{k: v for k, v in PLAIN.items() if k in group}, "params": [stand_in]}
    )
    step = plain_step(optimizer)
    with torch.no_grad():
        for _ in range(2):
            stand_in.grad = torch.full_like(stand_in, gradient)
            try:
                step(twin)
            except TypeError as error:
                raise CaptureError(
                    f"{type(optimizer).__name__}.step cannot be called without a closure: {error}",
                    accepted="optimizers that step from gradients alone",
                ) from error
    return recorder


def _check_gradient_free(
    optimizer: torch.optim.Optimizer, left: _Recorder, right: _Recorder
) -> None:
    for key, value in left.first.items():
        if _is_velocity(optimizer, key):
            continue
        other = right.first.get(key)
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            same = torch.equal(value, other)
        else:
            same = value is other or value == other
        if not same or value is None:
            raise CaptureError(
                f"the state {key!r} of {type(optimizer).__name__} is made of the first gradient",
                accepted="states that are the same before any first step",
                todo="take one step with it before capture",
            )


def _counters(
    optimizer: torch.optim.Optimizer, tried: _Recorder
) -> dict[str, tuple[Number, Number]]:
    """Return the numbers among the states, with what each of two steps has added."""
    found: dict[str, tuple[Number, Number]] = {}
    for key, first in tried.first.items():
        if isinstance(first, Tensor):
            continue
        last = tried[key]
        if not isinstance(first, int | float) or not isinstance(last, int | float):
            raise CaptureError(
                f"the state {key!r} of {type(optimizer).__name__} is {type(first).__name__}",
                accepted="tensors and counters",
            )
        found[key] = (first, (last - first) / 2)
    return found
