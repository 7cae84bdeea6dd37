"""The user's optimizer, traced: its own `step` runs on a clone that has the tensors of the trace.

All groups step at once, so that code may look at all of them. Its choice of implementation
(`foreach`, `capturable`) is set to the plain one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError, SbpError
from sbp_torch._torch_compat import compiling, storage_key
from sbp_torch._torch_optim_compat import unprofiled
from sbp_torch.capture.optimizer_clones import clone_of, is_known, kind_of, plain_step
from sbp_torch.capture.parameter_group import ParameterGroup
from sbp_torch.capture.sources import user_frame

#: Optimizers whose plain code branches on host numbers: they run with steps as tensors.
_TENSOR_STEPS = (torch.optim.ASGD, torch.optim.Rprop)


class TracedOptimizer:
    """One optimizer as a function of its states, by its own code where that can be traced.

    Args:
        optimizer: Any.
        groups: All of its groups, in order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParameterGroup]) -> None:
        self.optimizer, self.groups = optimizer, groups
        self.name = type(optimizer).__name__
        #: Names of the parameters that the optimizer's code sees, group by group. Known code leaves
        #: frozen parameters alone; whose code we do not know may look at them.
        self.seen = [
            [name for name in group.parameters if name not in group.functional]
            if is_known(optimizer)
            else group.all_names
            for group in groups
        ]
        self.tensor_steps = kind_of(optimizer) in _TENSOR_STEPS
        self.tensor_steps |= any(group.may_skip for group in groups)

    def updated(self) -> list[str]:
        """Return the names of the parameters that a step may change."""
        functional = (name for group in self.groups for name in group.functional)
        return [*functional, *(name for names in self.seen for name in names)]

    def step(
        self,
        parameters: MutableMapping[str, Tensor],
        grads: Mapping[str, Tensor],
        states: MutableMapping[str, Tensor],
        scalars: Mapping[str, Tensor],
    ) -> None:
        """Update the parameters of all groups, and their states. See `Update.__call__`."""
        for group in self.groups:
            group.update(parameters, grads, states, scalars)
        if not any(self.seen):
            return
        clone = clone_of(self.optimizer)
        for group, names in zip(self.groups, self.seen, strict=True):
            settings = group.plain(scalars)
            if self.tensor_steps and "capturable" in settings:
                settings |= {"capturable": True}
            for name in names:
                parameters[name].grad = grads.get(name)
                if name in group.parameters:
                    clone.state[parameters[name]] = self._states(group, name, states)
            clone.param_groups.append({**settings, "params": [parameters[name] for name in names]})
        members = [parameters[name] for names in self.seen for name in names]
        with in_place_only(self.name, members):
            self._run(clone)
        for group, names in zip(self.groups, self.seen, strict=True):
            for name in (name for name in names if name in group.parameters):
                self._store(group, name, clone.state.get(parameters[name], {}), states)

    def _states(
        self, group: ParameterGroup, name: str, states: MutableMapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the states of a parameter as the optimizer keeps them."""
        own: dict[str, Any] = {key: states[f"{name}.{key}"] for key in group.states[name]}
        if self.tensor_steps and "step" in own:  # as exact as numbers on the host
            own["step"] = own["step"].double()
        if self.tensor_steps and "capturable" in group.settings and group.parameters[name].dim():
            # Where it is not captured, PyTorch computes with these on the host, too: ASGD's eta.
            own |= {key: one.double() for key, one in own.items() if _is_number(one)}
        for key, (number, by) in group.numbers.get(name, {}).items():
            own[key] = number
            if by:
                # The graph counts; the optimizer's code sees the number before it adds to it.
                count = states[f"{name}.{key}"] = states[f"{name}.{key}"] + by
                own[key] = count.item() - by
        return own

    def _store(
        self,
        group: ParameterGroup,
        name: str,
        made: Mapping[str, Any],
        states: MutableMapping[str, Tensor],
    ) -> None:
        """Store what a step has made of a parameter's states."""
        for key, value in made.items():
            full = f"{name}.{key}"
            if key in group.numbers.get(name, {}):
                continue
            if full not in states:
                raise CaptureError(
                    f"{self.name} makes the state {key!r} of {name!r} in a later step",
                    accepted="optimizers that make all states in their first step",
                    todo="take the steps before capture",
                )
            states[full] = value.to(states[full].dtype)

    def _run(self, clone: torch.optim.Optimizer) -> None:
        hint = compiling() if self.tensor_steps else nullcontext()
        try:
            with hint, unprofiled(), _symbolic_math():
                plain_step(self.optimizer)(clone)
        except SbpError:
            raise
        except Exception as error:
            if is_known(self.optimizer):
                raise
            raise CaptureError(
                f"{self.name}.step cannot be captured: {type(error).__name__}: "
                f"{next(iter(str(error).splitlines()), '')}",
                where=user_frame(error),
                accepted="arithmetic on tensors, settings and numbers of the step (+, -, *, /, //, "
                "%, **, abs, math.sqrt, math.pow)",
                todo="choose with torch.where on a 0-d tensor instead of if; write x ** 0.5, or "
                "math.sqrt(x), for a sqrt that was imported by its name",
            ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


@contextmanager
def in_place_only(name: str, members: Sequence[Tensor]) -> Iterator[None]:
    """Refuse an optimizer that puts other tensors into its parameters: no graph would see it.

    Args:
        name: Of the optimizer.
        members: Its parameters.

    Raises:
        CaptureError: a parameter lies in other memory afterwards.
    """
    storages = [storage_key(member) for member in members]
    yield
    for member, storage in zip(members, storages, strict=True):
        if storage_key(member) != storage:
            raise CaptureError(
                f"{name} puts another tensor into a parameter of shape {tuple(member.shape)}",
                accepted="changes in place",
                todo="write p.copy_(...) or p.sub_(...) instead of p.data = ...",
            )


@contextmanager
def _symbolic_math() -> Iterator[None]:
    """Let `math.sqrt` and `math.pow` take the host numbers of a trace."""
    before = {name: getattr(math, name) for name in _MATH}
    for name, symbolic in _MATH.items():
        setattr(math, name, _symbolic_or_plain(before[name], symbolic))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(math, name, function)


#: What functions of `math` are on host numbers of a trace.
_MATH: Mapping[str, Callable[..., Any]] = {"sqrt": torch.sym_sqrt, "pow": operator.pow}


def _symbolic_or_plain(
    plain: Callable[..., Any], symbolic: Callable[..., Any]
) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        traced = any(isinstance(value, torch.SymFloat | torch.SymInt) for value in args)
        return (symbolic if traced else plain)(*args)

    return function
