"""Find the states of an optimizer before its first step, without a step on the model.

Optimizers make their states in their first step, by `state[key] = value`. So a clone takes that
step on small stand-ins of a parameter, in two sizes and with different numbers, and a recorder
keeps the first value of each key:

    stand-in (3, 3), numbers a     exp_avg: zeros (3, 3)   slow: a            step: 0
    stand-in (4, 4), numbers b     exp_avg: zeros (4, 4)   slow: b            step: 0
    the parameter's shape, meta    exp_avg: (768, 768)     slow: (768, 768)   step: ()
    derived rule                   filled with 0           a copy of p        filled with 0

States that follow neither rule are made by a step on the parameter's own values. The rules are
derived from a first step only; `differential_validation` checks them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError
from sbp_core.runtime import Number
from sbp_torch._torch_compat import TorchDispatchMode
from sbp_torch._torch_optim_compat import constructed_states
from sbp_torch.graph_capture.diagnostics import user_frame
from sbp_torch.graph_capture.optimizer_clones import (
    PLAIN,
    SMALL,
    clone_of,
    is_known,
    kind_of,
    plain_step,
    settings_of,
    small_shape,
)

#: SGD's key for the momentum of a parameter.
VELOCITY = "momentum_buffer"

#: Steps of a trial: the third shows whether a number grows by the same amount again.
_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialStates:
    """The states of one parameter before the first step of its optimizer.

    Args:
        tensors: Tensors by key. A tensor that is filled with one number is an expanded scalar,
            which takes no memory; it is on the CPU if the parameter is on the `meta` device.
        copies: Keys of the tensors that are copies of the parameter, possibly in another dtype.
        numbers: Python numbers by key: the first value, and the increment of each step.
    """

    tensors: Mapping[str, Tensor]
    copies: frozenset[str] = frozenset()
    numbers: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)


class _Recorder(dict[str, Any]):
    """The states of a parameter, which also keeps the first value of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)

    # The methods of `dict` would not call `__setitem__`.

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


#: The states of a stand-in: the first value of each key; and, by key, the values that are no
#: tensors after each step, from the step that makes them.
_Trial = tuple[Mapping[str, Any], Mapping[str, list[Any]]]


def _tensors(first: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in first.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """How the states of all parameters of one shape and dtype begin.

    Args:
        fills: The number that each tensor is filled with, by key; None for a copy of the parameter.
        shapes: Tensors without data by key, or with data if the optimizer reads values.
        numbers: See `InitialStates`.
    """

    fills: Mapping[str, Number | None]
    shapes: Mapping[str, Tensor]
    numbers: Mapping[str, tuple[Number, Number]]


class _ReadsZero(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Lets an optimizer step on tensors without data though it reads numbers: all are 0.

    Shapes of states rarely depend on them. Adafactor reads the norm of each parameter.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


class InitialStateProbe:
    """Finds the states of parameters that an optimizer has not updated yet."""

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self.optimizer, self.index = optimizer, index
        self.name = type(optimizer).__name__
        self.group = optimizer.param_groups[index]
        self._known: dict[object, _Rules | None] = {}

    def of(self, parameter: Tensor) -> InitialStates:
        """Return the states of a parameter.

        Raises:
            CaptureError: a state depends on the first gradient, or is neither a tensor nor a
                counter; or a step on a stand-in fails.
        """
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        if kind_of(self.optimizer) is torch.optim.SGD:
            if not self.group["momentum"]:
                return InitialStates(tensors={})
            zero = torch.zeros((), dtype=parameter.dtype, device=device)
            return InitialStates(tensors={VELOCITY: zero.expand(parameter.shape)})
        looks = (tuple(parameter.shape), parameter.dtype, parameter.device)
        if looks not in self._known:
            self._known[looks] = self._rules(parameter)
        rules = self._known[looks]
        copies = () if rules is None else [key for key, fill in rules.fills.items() if fill is None]
        if rules is None or (copies and not parameter.is_meta):
            # Use the parameter's own values. A state that looks like a copy on stand-ins might be
            # clipped for larger numbers, so real values are used if there are any.
            first, after = self._trial(parameter, 0.5)
            numbers = self._counters(after)
            return InitialStates(tensors=_tensors(first), copies=frozenset(copies), numbers=numbers)
        tensors: dict[str, Tensor] = {}
        for key, fill in rules.fills.items():
            like = rules.shapes[key]
            if fill is None:
                tensors[key] = parameter.detach().to(like.dtype, copy=True)
                continue
            # Counters of steps stay on the host for parameters on any device.
            where = torch.device("cpu") if like.device.type == "cpu" else device
            tensors[key] = torch.full((), fill, dtype=like.dtype, device=where).expand(like.shape)
        return InitialStates(tensors=tensors, copies=frozenset(copies), numbers=rules.numbers)

    def numbers_of(self, parameter: Tensor) -> Mapping[str, tuple[Number, Number]]:
        """Return the Python numbers of a parameter, for any initial values of its tensors."""
        return self._counters(self._trial(_stand_in(parameter), 0.5)[1])

    def _rules(self, parameter: Tensor) -> _Rules | None:
        """Return the rules for all parameters like this one; None if there are none."""
        small, other = _stand_in(parameter), _stand_in(parameter, SMALL + 1) + 0.25
        (first, after), (second, _) = self._trial(small, 0.5), self._trial(other, 0.5)
        self._check_gradient_free(first, self._trial(small, -2.0)[0])
        meta = torch.empty_like(parameter, device="meta")
        try:
            with _ReadsZero():  # type: ignore[no-untyped-call] # see above
                shapes = self._step(meta, 0.5)[0]
        except Exception:  # it reads more than single numbers, or divides by one
            real = torch.zeros_like(parameter, device="cpu") if parameter.is_meta else parameter
            shapes = self._trial(real, 0.5)[0]
        if not first.keys() == second.keys() == shapes.keys():
            return None  # the set of states depends on the shape
        fills: dict[str, Number | None] = {}
        for key, value in _tensors(first).items():
            one, moved = value.flatten()[:1], second[key]
            if self._is_velocity(key) or not (value.numel() or shapes[key].numel()):
                fills[key] = 0.0
            elif value.numel() and (value == one).all() and (moved == one).all():
                fills[key] = one.item()
            elif _is_copy(value, small) and _is_copy(moved, other):
                fills[key] = None
            else:
                return None
        return _Rules(fills=fills, shapes=shapes, numbers=self._counters(after))

    def _trial(self, value: Tensor, gradient: float) -> _Trial:
        """Take steps on a stand-in; return its states.

        Raises:
            CaptureError: a step fails.
        """
        try:
            return self._step(value, gradient)
        except CaptureError:
            raise
        except Exception as error:
            raise failed_step(self.optimizer, value, error) from error

    def _step(self, value: Tensor, gradient: float) -> _Trial:
        clone = clone_of(self.optimizer, own_attributes=True)
        recorder = _Recorder()
        stand_in = value.detach().clone().requires_grad_()
        clone.state[stand_in] = recorder
        members = [stand_in]
        for index, group in enumerate(self.optimizer.param_groups):
            plain = {key: value for key, value in PLAIN.items() if key in group}
            if index == self.index:
                recorder.update(constructed_states(self.optimizer, group, stand_in.detach()))
                clone.param_groups.append({**settings_of(group), **plain, "params": [stand_in]})
            elif not is_known(self.optimizer):  # its code may read all groups
                others = [_stand_in(p).to(value.device) for p in group["params"][:1]]
                members += [other.requires_grad_() for other in others]
                clone.param_groups.append({**settings_of(group), **plain, "params": others})
        step, after = plain_step(self.optimizer), defaultdict[str, list[Any]](list)
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            for _ in range(_STEPS):
                for member in members:
                    dense = torch.full_like(member, gradient)
                    lazy = kind_of(self.optimizer) is torch.optim.SparseAdam
                    member.grad = dense.to_sparse(min(1, dense.dim())) if lazy else dense
                step(clone)
                for key, state in clone.state[stand_in].items():
                    if not isinstance(state, Tensor):
                        after[key].append(state)
        return recorder.first, after

    def _is_velocity(self, key: str) -> bool:
        """Whether a state is SGD's velocity, which starts with the first gradient as if from 0."""
        return key == VELOCITY and isinstance(self.optimizer, torch.optim.SGD)

    def _check_gradient_free(
        self, first: Mapping[str, Any], other_gradient: Mapping[str, Any]
    ) -> None:
        for key, value in first.items():
            if self._is_velocity(key):
                continue
            other = other_gradient.get(key)
            if isinstance(value, Tensor) and isinstance(other, Tensor):
                same = torch.equal(value, other)
            else:
                same = value is other or value == other
            if not same or value is None:
                raise CaptureError(
                    f"the state {key!r} of {self.name} is computed from the first gradient",
                    accepted="states that are the same before any first step",
                    todo="take one step with it before capture",
                )

    def _counters(self, after: Mapping[str, list[Any]]) -> dict[str, tuple[Number, Number]]:
        """Return the numbers among the states: the first values, and the increments per step."""
        found: dict[str, tuple[Number, Number]] = {}
        for key, values in after.items():
            if any(not isinstance(value, int | float) for value in values):
                kinds = sorted({type(value).__name__ for value in values})
                raise CaptureError(
                    f"the state {key!r} of {self.name} is {' or '.join(kinds)}",
                    accepted="tensors and counters",
                    todo="keep settings in the groups or in attributes",
                )
            by = values[1] - values[0] if len(values) > 1 else 0
            if any(value != values[0] + index * by for index, value in enumerate(values)):
                raise CaptureError(
                    f"the state {key!r} of {self.name} is a Python number that goes "
                    f"{', '.join(map(repr, values))}",
                    accepted="Python numbers that each step adds the same amount to",
                    todo="keep a 0-d tensor, or compute it from the number of the step",
                )
            found[key] = (values[0] - by, by)
        return found


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


def _is_copy(state: Tensor, parameter: Tensor) -> bool:
    return state.shape == parameter.shape and torch.equal(state, parameter.to(state.dtype))
