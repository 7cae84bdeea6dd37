"""What the states of an update start with, told from a small copy of the program.

A deferred model has no values to make them from, and whole tensors of them are not wanted. Most are
filled with one number; the others are copies of their parameter. The update of a few small
parameters, one of each kind, shows which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_torch.capture.optimizer_clones import SMALL, over, small_shape
from sbp_torch.capture.update import Update
from sbp_torch.update_options import UpdateOptions

#: Extents of the dims of small parameters, at most: of two sizes, to see what goes by the size.
_EXTENTS = (SMALL, SMALL + 2)

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
    small = [_Small(model, optimizer, options, extent) for extent in _EXTENTS]
    found: dict[str, FirstValue] = {}
    for entry in update.inputs():
        value, of = values[entry.name], entry.of or ""
        if not value.is_meta:
            kept = _expanded(value.detach())
            found[entry.name] = FirstValue(value=kept, of=of, dtype=value.dtype)
            continue
        first, other = (each.number(of, entry.name[len(of) :]) for each in small)
        same = first == other if first is None or other is None else torch.equal(first, other)
        if not same:
            raise _of_its_own(entry.name, optimizer)
        whole = None if first is None else first.expand(value.shape)
        found[entry.name] = FirstValue(value=whole, of=of, dtype=value.dtype)
    return found


def _expanded(value: Tensor) -> Tensor:
    """Return a real state; one number, expanded, if it is the same everywhere."""
    if value.numel() <= 1 or not bool((value == value.flatten()[0]).all()):
        return value
    return value.flatten()[0].clone().expand(value.shape)


def _of_its_own(name: str, optimizer: torch.optim.Optimizer) -> CaptureError:
    return CaptureError(
        f"the state {name!r} of {type(optimizer).__name__} starts with values of its own",
        accepted="one number for all elements, or a copy of the parameter",
        todo="build the model with deferred(..., whole=True)",
    )


def _kinds(model: nn.Module, optimizer: torch.optim.Optimizer, extent: int) -> dict[Tensor, _Kind]:
    """Return the kind of every parameter."""
    found: dict[Tensor, _Kind] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            shape = small_shape(parameter.shape, extent)
            found[parameter] = (index, parameter.dtype, shape, parameter.requires_grad)
    for parameter in model.parameters():
        if parameter not in found:
            shape = small_shape(parameter.shape, extent)
            found[parameter] = (-1, parameter.dtype, shape, parameter.requires_grad)
    return found


class _Small(nn.Module):
    """One small parameter of each kind, and what the states of an optimizer over them start with.

    Args:
        model, optimizer, options: See `first_values`.
        extent: Of dims, at most.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: UpdateOptions,
        extent: int,
    ) -> None:
        super().__init__()
        self.names: dict[_Kind, str] = {}
        self.of = optimizer
        kinds = _kinds(model, optimizer, extent)
        small = {parameter: self._parameter(kind) for parameter, kind in kinds.items()}
        own = over(optimizer, lambda params: list(dict.fromkeys(small[p] for p in params)))
        self.firsts = Update(self, own, options).values()
        self.kinds = {
            name: kinds[parameter]
            for name, parameter in model.named_parameters()
            if parameter in kinds
        }

    def number(self, of: str, rest: str) -> Tensor | None:
        """Return the number that a state is filled with: 0-d; None for a copy of its parameter.

        Args:
            of: The parameter in the model; empty for states of none.
            rest: What the name of the state says beside it.

        Raises:
            CaptureError: it is neither.
        """
        own = self.names[self.kinds[of]] if of else ""
        first = self.firsts.get(own + rest)
        if first is None:  # there only for larger parameters
            raise _of_its_own(of + rest, self.of)
        if not first.numel():
            return first.new_zeros(())
        number = first.detach().flatten()[0].clone()
        parameter = self.get_parameter(own) if of else None
        same = parameter is not None and first.shape == parameter.shape
        if same and parameter is not None and torch.equal(first, parameter.to(first.dtype)):
            return None
        if not bool((first == number).all()):
            raise _of_its_own(of + rest, self.of)
        return number

    def _parameter(self, kind: _Kind) -> nn.Parameter:
        if kind not in self.names:
            _, dtype, shape, moves = kind
            self.names[kind] = name = f"p{len(self.names)}"
            values = torch.linspace(-1.0, 1.0, max(2, torch.Size(shape).numel()))
            values = values[: torch.Size(shape).numel()].reshape(shape).to(dtype)
            self.register_parameter(name, nn.Parameter(values, requires_grad=moves))
        return self.get_parameter(self.names[kind])
