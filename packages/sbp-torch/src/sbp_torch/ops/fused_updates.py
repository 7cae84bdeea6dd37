"""Fused optimizer updates of one parameter as functional operators, for PyTorch.

    sbp.fused_adam(p, g, mean, square, largest, step, lr, ...)   -> new p, mean, square, largest
    sbp.fused_sgd(p, g, velocity, lr, ...)                       -> new p, velocity
    sbp.fused_adagrad(p, g, square, step, lr, ...)               -> new p, square

Each runs the kernel behind `fused=True` of `torch.optim` on copies of the states. The number of
steps is a host number (`default`), or a 0-d tensor where a step may be skipped (`tensor_step`).
Importing this module registers them with PyTorch. The forms in place, `fused_adam_` and kin, run it
on the states themselves: only plans name these (`IN_PLACE`), so PyTorch need not know them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbp_core.runtime import Number


def fused_adam(
    p: Tensor,
    g: Tensor,
    mean: Tensor,
    square: Tensor,
    largest: Sequence[Tensor],
    step: Number | Tensor,
    lr: Number,
    *,
    decoupled: bool,
    **settings: float | bool,
) -> list[Tensor]:
    """Return the new parameter, mean, mean square and, if there is one, largest mean square.

    Args:
        p: The parameter, floating.
        g: Its gradient, of the same shape.
        mean: Of gradients.
        square: Mean square of gradients.
        largest: None or one of that shape (AMSGrad).
        step: Number of this step, from 1.
        lr: Learning rate.
        decoupled: Decay weights as AdamW does.
        settings: `beta1`, `beta2`, `weight_decay`, `eps`, `maximize`.
    """
    p, mean, square, *most = (_copy(value) for value in (p, mean, square, *largest))
    return fused_adam_(p, g, mean, square, most, step, lr, decoupled=decoupled, **settings)


def fused_adam_(
    p: Tensor,
    g: Tensor,
    mean: Tensor,
    square: Tensor,
    largest: Sequence[Tensor],
    step: Number | Tensor,
    lr: Number,
    *,
    decoupled: bool,
    **settings: float | bool,
) -> list[Tensor]:
    """Write the values of `fused_adam` over the parameter and its states, and return these."""
    kernel = torch.ops.aten._fused_adamw_ if decoupled else torch.ops.aten._fused_adam_
    old = [p, mean, square, *largest]
    new = [*map(_ordered, old)]
    lists = ([new[0]], [_like(g, p)], [new[1]], [new[2]], new[3:], [_count(step, p)])
    kernel(*lists, lr=lr, amsgrad=bool(largest), **settings)
    return _written(old, new)


def fused_sgd(
    p: Tensor, g: Tensor, velocity: Sequence[Tensor], lr: Number, **settings: float | bool
) -> list[Tensor]:
    """Return the new parameter and, if there is one, velocity.

    Args:
        p: The parameter, floating.
        g: Its gradient, of the same shape.
        velocity: None or one of that shape.
        lr: Learning rate.
        settings: `momentum`, `dampening`, `weight_decay`, `nesterov`, `maximize`.
    """
    p, *speed = (_copy(value) for value in (p, *velocity))
    return fused_sgd_(p, g, speed, lr, **settings)


def fused_sgd_(
    p: Tensor, g: Tensor, velocity: Sequence[Tensor], lr: Number, **settings: float | bool
) -> list[Tensor]:
    """Write the values of `fused_sgd` over the parameter and its velocity, and return these."""
    old = [p, *velocity]
    new = [*map(_ordered, old)]
    lists = ([new[0]], [_like(g, p)], new[1:])
    torch.ops.aten._fused_sgd_(*lists, lr=lr, is_first_step=False, **settings)
    return _written(old, new)


def fused_adagrad(
    p: Tensor,
    g: Tensor,
    square: Tensor,
    step: Number | Tensor,
    lr: Number,
    **settings: float | bool,
) -> list[Tensor]:
    """Return the new parameter and sum of squares.

    Args:
        p: The parameter, floating.
        g: Its gradient, of the same shape.
        square: Sum of squared gradients.
        step: Number of this step, from 1.
        lr: Learning rate.
        settings: `lr_decay`, `weight_decay`, `eps`, `maximize`.
    """
    return fused_adagrad_(_copy(p), g, _copy(square), step, lr, **settings)


def fused_adagrad_(
    p: Tensor,
    g: Tensor,
    square: Tensor,
    step: Number | Tensor,
    lr: Number,
    **settings: float | bool,
) -> list[Tensor]:
    """Write the values of `fused_adagrad` over parameter and sum of squares, and return these."""
    old = [p, square]
    new = [*map(_ordered, old)]
    lists = ([new[0]], [_like(g, p)], [new[1]], [_count(step, p)])
    torch.ops.aten._fused_adagrad_(*lists, lr=lr, **settings)
    return _written(old, new)


def _copy(value: Tensor) -> Tensor:
    """Return a copy whose elements lie in order, as the kernels take for granted."""
    return value.clone(memory_format=torch.contiguous_format)


def _ordered(value: Tensor) -> Tensor:
    """Return a tensor, or a copy if its elements do not lie in order."""
    return value if value.is_contiguous() else _copy(value)


def _written(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """Return the old tensors with the new values; most were written by the kernel itself."""
    for one, other in zip(old, new, strict=True):
        if one is not other:
            one.copy_(other)
    return old


def _like(g: Tensor, p: Tensor) -> Tensor:
    return g.to(p.dtype).contiguous()


def _count(step: Number | Tensor, p: Tensor) -> Tensor:
    if isinstance(step, Tensor):
        return step.to(device=p.device, dtype=torch.float32)
    return torch.full((), step, dtype=torch.float32, device=p.device)


#: The forms in place by name: they return the tensors that they have written over.
IN_PLACE: dict[str, Callable[..., list[Tensor]]] = {
    "sbp.fused_adagrad_.default": fused_adagrad_,
    "sbp.fused_adagrad_.tensor_step": fused_adagrad_,
    "sbp.fused_adam_.default": fused_adam_,
    "sbp.fused_adam_.tensor_step": fused_adam_,
    "sbp.fused_sgd_.default": fused_sgd_,
}

#: Of each operator: its function, how many of the first arguments are tensors, its arguments.
_SCHEMAS: dict[str, tuple[Callable[..., list[Tensor]], int, str]] = {
    "fused_adam": (
        fused_adam,
        5,
        "(Tensor p, Tensor g, Tensor mean, Tensor square, Tensor[] largest, {step}, Scalar lr, *, "
        "Scalar beta1, Scalar beta2, Scalar weight_decay, float eps, bool maximize, "
        "bool decoupled)",
    ),
    "fused_sgd": (
        fused_sgd,
        3,
        "(Tensor p, Tensor g, Tensor[] velocity, Scalar lr, *, Scalar momentum, Scalar dampening, "
        "Scalar weight_decay, bool nesterov, bool maximize)",
    ),
    "fused_adagrad": (
        fused_adagrad,
        3,
        "(Tensor p, Tensor g, Tensor square, {step}, Scalar lr, *, float lr_decay, "
        "Scalar weight_decay, float eps, bool maximize)",
    ),
}

#: The overloads, by how the number of steps is given.
_STEPS = {"": "Scalar step", ".tensor_step": "Tensor step"}


def _shapes_only(count: int) -> Callable[..., list[Tensor]]:
    """Return what makes tensors like the first arguments, but for the gradient."""

    def made(*args: Any, **_: Any) -> list[Tensor]:
        p, _g, *states = args[:count]
        flat = [one for state in states for one in (state if isinstance(state, list) else [state])]
        return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (p, *flat)]

    return made


def _register(library: torch.library.Library) -> torch.library.Library:
    for name, (function, count, schema) in _SCHEMAS.items():
        for overload, step in _STEPS.items():
            if overload and "{step}" not in schema:
                continue
            text = f"{name}{overload}{schema.format(step=step)} -> Tensor[]"
            library.define(text, tags=(torch.Tag.pointwise,))  # type: ignore[no-untyped-call] # torch leaves it untyped
            library.impl(f"{name}{overload}", function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
            torch.library.register_fake(f"sbp::{name}{overload}", _shapes_only(count), lib=library)
    return library


_LIBRARY = torch.library.Library("sbp", "FRAGMENT")  # type: ignore[no-untyped-call] # torch leaves it untyped
_REGISTERED = _register(_LIBRARY)
