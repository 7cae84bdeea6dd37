"""Run the user's optimizer as a function of its states, so that capture can trace its `step`.

Its own `step` runs on a clone that has the tensors of the trace. All groups step at once, because
its code may read all of them. Its choice of implementation (`foreach`, `capturable`) is set to the
plain one. Optimizers that cannot be traced have a functional form (`functional_updates`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError, SbpError
from sbp_core.runtime import Number
from sbp_torch._torch_compat import compiling, storage_key
from sbp_torch._torch_optim_compat import unprofiled
from sbp_torch._torch_patches import replaced
from sbp_torch.graph_capture.diagnostics import user_frame
from sbp_torch.graph_capture.functional_updates import (
    LOOKUPS,
    UpdateFunction,
    functional_update,
    sgd,
)
from sbp_torch.graph_capture.fused_kernels import takes_kernel
from sbp_torch.graph_capture.optimizer_clones import PLAIN, clone_of, is_known, kind_of, plain_step
from sbp_torch.graph_capture.optimizer_states import InitialStateProbe
from sbp_torch.graph_capture.sparse_lookups import SparseGradient, check_sparse
from sbp_torch.update_options import SETTINGS, UpdateOptions


class _Scheduled(torch.SymFloat):
    """A setting that is a scalar input.

    Optimizers test whether it is zero, to skip work. A trace cannot know, so the test is false: the
    work is done for zero, too, with the same result.
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
    """Return the value of a scalar input in the settings of a group."""
    key, place = SETTINGS[setting]
    value = settings[key]
    return float(value if place is None else value[place])


class ParameterGroup:
    """A group of an optimizer, as a function of its states.

    Args:
        optimizer: The optimizer of the group.
        index: Index of the group.
        parameters: Its parameters by name.
        suffix: Suffix of the names of its scalar inputs.
        options: See `UpdateOptions`.
        device: Kind of device that the step will run on; None if nothing will run.

    Raises:
        CaptureError: the states before the first step are not known, or steps may be skipped and
            the optimizer does not support this.
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
        #: The trained parameters.
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.may_skip = options.loss_scaling is not None
        #: Names of scalar inputs by setting.
        self.scalars = scalar_names(self.settings, suffix, options)
        self._probe = InitialStateProbe(optimizer, index)
        #: Python numbers among the states: their values, and their increments per step.
        self.numbers: dict[str, dict[str, tuple[Number, Number]]] = {}
        #: Keys of the states that begin as copies of their parameter, by parameter.
        self.copies: dict[str, frozenset[str]] = {}
        #: States by parameter and key.
        self.states = {name: self._tensors(name, p) for name, p in self.parameters.items()}
        #: Functions for the parameters that the optimizer's own code does not update.
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
            if update is sgd:  # it needs the number of the step, but SGD does not count steps
                self.states[name]["step"] = torch.zeros(())
        traced = [name for name in self.parameters if name not in self.functional]
        counts = any("step" in self.states[name] for name in traced)
        counts = counts or any(by for of in self.numbers.values() for _, by in of.values())
        if self.may_skip and counts and "capturable" not in self.settings:
            raise CaptureError(
                f"{type(self.optimizer).__name__} reads the number of the step on the host, which "
                "does not know whether an overflow skips the step",
                accepted="optimizers of torch.optim and sbp_torch.optim under loss scaling",
                todo="train in bfloat16, which needs no loss scaling",
            )

    def _tensors(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the present states of a parameter, else the states before the first step."""
        made = self.optimizer.state.get(parameter) or {}
        if any(isinstance(value, Tensor) and value.is_meta for value in made.values()):
            made = {}  # made with the optimizer for a parameter without values
        if kind_of(self.optimizer) is torch.optim.SGD and not self.settings["momentum"]:
            made = {}  # it ignores states from a time when it had a momentum
        tensors = {key: value for key, value in made.items() if isinstance(value, Tensor)}
        # Some may be Python numbers, which appear as tensors in the optimizer after training.
        may_be_numbers = not is_known(self.optimizer) and any(
            not one.dim() and one.dtype == torch.float64 for one in tensors.values()
        )
        if not made or len(tensors) < len(made) or may_be_numbers:
            if made:  # it has stepped: only the increments are unknown
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

    def scalar_values(self) -> dict[str, float]:
        """Return the present values of the scalar inputs, by name."""
        return {name: setting_of(self.settings, key) for key, name in self.scalars.items()}

    def plain(self, scalars: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the settings of a step, with the plain implementation and scalar inputs."""
        plain = {key: value for key, value in PLAIN.items() if key in self.settings}
        found: dict[str, Any] = {**self.settings, **plain}
        for setting, name in self.scalars.items():
            key, place = SETTINGS[setting]
            number: Any = scalars[name].item()
            if setting != "lr" and isinstance(number, torch.SymFloat):
                number = _Scheduled(number.node)  # type: ignore[no-untyped-call] # torch's
            if place is not None:
                number = tuple(number if at == place else one for at, one in enumerate(found[key]))
            found[key] = number
        return found

    def update(
        self,
        parameters: MutableMapping[str, Tensor],
        grads: Mapping[str, Tensor],
        states: MutableMapping[str, Tensor],
        scalars: Mapping[str, Tensor],
        sparse: Mapping[str, SparseGradient],
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
            if name in sparse:
                own[LOOKUPS] = sparse[name].counts
            parameter, made = update(settings, parameters[name], grads[name], own, step)
            parameters[name] = parameter.to(parameters[name].dtype)
            for key, value in made.items():
                states[f"{name}.{key}"] = value.to(own[key].dtype)


#: The replacements of functions of `math` for host numbers in a trace.
_MATH: Mapping[str, Callable[..., Any]] = {"sqrt": torch.sym_sqrt, "pow": operator.pow}

#: Optimizers whose plain code branches on host numbers: they run with steps as tensors.
_TENSOR_STEPS = (torch.optim.ASGD, torch.optim.Rprop)


class TracedOptimizer:
    """One optimizer as a function of its states, by its own code if that can be traced."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParameterGroup]) -> None:
        self.optimizer, self.groups = optimizer, groups
        self.name = type(optimizer).__name__
        #: Names of the parameters that the optimizer's code gets, group by group. Known optimizers
        #: ignore frozen parameters; unknown ones may read them.
        self.seen = [
            [name for name in group.parameters if name not in group.functional]
            if is_known(optimizer)
            else group.all_names
            for group in groups
        ]
        self.tensor_steps = kind_of(optimizer) in _TENSOR_STEPS
        self.tensor_steps |= any(group.may_skip for group in groups)

    def updated_names(self) -> list[str]:
        """Return the names of the parameters that a step may change."""
        functional = (name for group in self.groups for name in group.functional)
        return [*functional, *(name for names in self.seen for name in names)]

    def step(
        self,
        parameters: MutableMapping[str, Tensor],
        grads: Mapping[str, Tensor],
        states: MutableMapping[str, Tensor],
        scalars: Mapping[str, Tensor],
        sparse: Mapping[str, SparseGradient] = MappingProxyType({}),
    ) -> None:
        """Update the parameters of all groups, and their states. See `Update.__call__`."""
        for group in self.groups:
            for name in group.parameters.keys() & grads.keys():
                check_sparse(self.optimizer, group.settings, name, sparse.get(name))
            group.update(parameters, grads, states, scalars, sparse)
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
            made = [
                (name, key, value)
                for name in names
                if name in group.parameters
                for key, value in clone.state.get(parameters[name], {}).items()
                if key not in group.numbers.get(name, {})
            ]
            for name, key, value in made:
                full = f"{name}.{key}"
                if full not in states:
                    raise CaptureError(
                        f"{self.name} makes the state {key!r} of {name!r} in a later step",
                        accepted="optimizers that make all states in their first step",
                        todo="take the steps before capture",
                    )
                states[full] = value.to(states[full].dtype)

    def _states(
        self, group: ParameterGroup, name: str, states: MutableMapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the states of a parameter in the form in which the optimizer keeps them."""
        own: dict[str, Any] = {key: states[f"{name}.{key}"] for key in group.states[name]}
        if self.tensor_steps and "step" in own:  # as exact as numbers on the host
            own["step"] = own["step"].double()
        if self.tensor_steps and "capturable" in group.settings and group.parameters[name].dim():
            # Outside of capture, PyTorch also computes with these on the host: ASGD's eta.
            for key, one in own.items():
                if isinstance(one, Tensor) and one.dim() == 0 and one.is_floating_point():
                    own[key] = one.double()
        for key, (number, by) in group.numbers.get(name, {}).items():
            own[key] = number
            if by:
                # The graph counts; the optimizer's code gets the number before its own increment.
                count = states[f"{name}.{key}"] = states[f"{name}.{key}"] + by
                own[key] = count.item() - by
        return own

    def _run(self, clone: torch.optim.Optimizer) -> None:
        hint = compiling() if self.tensor_steps else nullcontext()
        plain = {name: getattr(math, name) for name in _MATH}

        def function(name: str, *args: Any) -> Any:
            traced = any(isinstance(value, torch.SymFloat | torch.SymInt) for value in args)
            return (_MATH if traced else plain)[name](*args)

        symbolic_math = replaced(math, **{name: partial(function, name) for name in _MATH})
        try:
            with hint, unprofiled(), symbolic_math:
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


@contextmanager
def in_place_only(name: str, members: Sequence[Tensor]) -> Iterator[None]:
    """Refuse an optimizer that gives its parameters other memory, which no graph can capture.

    Raises:
        CaptureError: a parameter is in other memory after the block.
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
