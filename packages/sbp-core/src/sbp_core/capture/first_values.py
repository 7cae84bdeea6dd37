"""What the states of an update start with, told from a small copy of the program.

A deferred model has no values to make them from, and whole tensors of them are not wanted. Most are
filled with one number; the others are copies of their parameter. The update of a few small
parameters, one of each kind, shows which. Knows torch.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.capture.update import Update
from sbp_core.errors import CaptureError
from sbp_core.optim.together import Together
from sbp_core.update_options import UpdateOptions

#: Extent of the dims of small parameters, at most.
_SMALL = 3

#: What makes the states of two parameters alike: group, dtype, small shape, and the first if empty.
_Kind = tuple[int, torch.dtype, tuple[int, ...], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstValue:
    """What a state starts with.

    Args:
        value: The whole state; it may be one number, expanded. None for a copy of a parameter.
        of: The name of that parameter.
        dtype: Of the state.
    """

    value: Tensor | None
    of: str
    dtype: torch.dtype


def first_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: UpdateOptions
) -> dict[str, FirstValue]:
    """Return what each state of an update starts with, by the name of its input.

    Args:
        model: Its parameters may lie on the `meta` device.
        optimizer: Over them.
        options: See `Update`.

    Raises:
        CaptureError: a state starts with something else than one number or its parameter.
    """
    update = Update(model, optimizer, options)
    values = update.values()
    small, kinds = _Small(), _kinds(model, optimizer)
    firsts = Update(small, small.optimizer(optimizer, kinds), options).values()
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    kind_of = {names[parameter]: kind for parameter, kind in kinds.items()}
    found: dict[str, FirstValue] = {}
    for entry in update.inputs():
        value, of = values[entry.name], entry.of or ""
        if not value.is_meta:
            kept = _expanded(value.detach())
            found[entry.name] = FirstValue(value=kept, of=of, dtype=value.dtype)
            continue
        own = small.names[kind_of[of]] if of else ""
        first = firsts[own + entry.name[len(of) :]]
        parameter = small.get_parameter(own) if of else None
        number = _number(first, parameter, entry.name, optimizer)
        whole = None if number is None else number.expand(value.shape)
        found[entry.name] = FirstValue(value=whole, of=of, dtype=value.dtype)
    return found


def _expanded(value: Tensor) -> Tensor:
    """Return a real state; one number, expanded, if it is the same everywhere."""
    if value.numel() <= 1 or not bool((value == value.flatten()[0]).all()):
        return value
    return value.flatten()[0].clone().expand(value.shape)


def _number(
    first: Tensor, parameter: Tensor | None, name: str, optimizer: torch.optim.Optimizer
) -> Tensor | None:
    """Return the number that a small state is filled with: 0-d; None for a copy."""
    if not first.numel():
        return first.new_zeros(())
    number = first.detach().flatten()[0].clone()
    same = parameter is not None and first.shape == parameter.shape
    if same and parameter is not None and torch.equal(first, parameter.to(first.dtype)):
        return None
    if not bool((first == number).all()):
        raise CaptureError(
            f"the state {name!r} of {type(optimizer).__name__} starts with values of its own",
            accepted="one number for all elements, or a copy of the parameter",
            todo="build the model with deferred(..., whole=True)",
        )
    return number


def _kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, _Kind]:
    """Return the kind of every parameter."""
    found: dict[Tensor, _Kind] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            shape = tuple(min(extent, _SMALL) for extent in parameter.shape)
            found[parameter] = (index, parameter.dtype, shape, parameter.requires_grad)
    for parameter in model.parameters():
        if parameter not in found:
            shape = tuple(min(extent, _SMALL) for extent in parameter.shape)
            found[parameter] = (-1, parameter.dtype, shape, parameter.requires_grad)
    return found


class _Small(nn.Module):
    """One small parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[_Kind, str] = {}

    def optimizer(
        self, optimizer: torch.optim.Optimizer, kinds: dict[Tensor, _Kind]
    ) -> torch.optim.Optimizer:
        """Return an optimizer of the same settings over small parameters."""
        small = {parameter: self._parameter(kind) for parameter, kind in kinds.items()}
        return _over(optimizer, lambda params: list(dict.fromkeys(small[p] for p in params)))

    def _parameter(self, kind: _Kind) -> nn.Parameter:
        if kind not in self.names:
            _, dtype, shape, moves = kind
            self.names[kind] = name = f"p{len(self.names)}"
            values = torch.linspace(-1.0, 1.0, max(2, torch.Size(shape).numel()))
            values = values[: torch.Size(shape).numel()].reshape(shape).to(dtype)
            self.register_parameter(name, nn.Parameter(values, requires_grad=moves))
        return self.get_parameter(self.names[kind])


def _over(
    optimizer: torch.optim.Optimizer, swapped: Callable[[list[Tensor]], list[Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same settings over other parameters."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    if isinstance(optimizer, Together) and isinstance(twin, Together):
        twin.optimizers = tuple(_over(one, swapped) for one in optimizer.optimizers)
        twin.param_groups = [group for one in twin.optimizers for group in one.param_groups]
    else:
        twin.param_groups = [
            {**group, "params": swapped(group["params"])} for group in optimizer.param_groups
        ]
    return twin
