"""Fused optimizer updates of one parameter as functional operators, for PyTorch.

    sbp.fused_adam(p, g, mean, square, largest, step, lr, ...)   -> new p, mean, square, largest
    sbp.fused_sgd(p, g, velocity, lr, ...)                       -> new p, velocity
    sbp.fused_adagrad(p, g, square, step, lr, ...)               -> new p, square

Each runs the kernel behind `fused=True` of `torch.optim` on copies of the states. The number of
steps is a host number (`default`), or a 0-d tensor where a step may be skipped (`tensor_step`).
Importing this module registers them with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Number = float | int


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
    new = [_copy(value) for value in (p, mean, square, *largest)]
    kernel = torch.ops.aten._fused_adamw_ if decoupled else torch.ops.aten._fused_adam_
    lists = ([new[0]], [_like(g, p)], [new[1]], [new[2]], new[3:], [_count(step, p)])
    kernel(*lists, lr=lr, amsgrad=bool(largest), **settings)
    return new


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
    new = [_copy(value) for value in (p, *velocity)]
    lists = ([new[0]], [_like(g, p)], new[1:])
    torch.ops.aten._fused_sgd_(*lists, lr=lr, is_first_step=False, **settings)
    return new


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
    new = [_copy(p), _copy(square)]
    lists = ([new[0]], [_like(g, p)], [new[1]], [_count(step, p)])
    torch.ops.aten._fused_adagrad_(*lists, lr=lr, **settings)
    return new


def _copy(value: Tensor) -> Tensor:
    """Return a copy whose elements lie in order, as the kernels take for granted."""
    return value.clone(memory_format=torch.contiguous_format)


def _like(g: Tensor, p: Tensor) -> Tensor:
    return g.to(p.dtype).contiguous()


def _count(step: Number | Tensor, p: Tensor) -> Tensor:
    if isinstance(step, Tensor):
        return step.to(device=p.device, dtype=torch.float32)
    return torch.full((), step, dtype=torch.float32, device=p.device)


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
