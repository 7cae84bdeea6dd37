"""Wrap PyTorch's fused optimizer kernels as functional operators that update one parameter.

    sbp.fused_adam(p, g, mean, square, largest, step, lr, ...)   -> new p, mean, square, largest
    sbp.fused_sgd(p, g, velocity, lr, ...)                       -> new p, velocity
    sbp.fused_adagrad(p, g, square, step, lr, ...)               -> new p, square

Each runs the kernel of `fused=True` of `torch.optim` on copies of the states. The number of steps
is a host number (`default`), or a 0-d tensor if a step may be skipped (`tensor_step`). Importing
this module registers the operators with PyTorch. The in-place forms, such as `fused_adam_`, run the
kernel on the states themselves. Only plans name them (`IN_PLACE`), so they are not registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbp_core.runtime import Number
from sbp_torch.ops import register


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
    """Overwrite parameter, mean, mean square and largest mean square, and return them.

    Args:
        p: The parameter, floating.
        g: Its gradient, of the same shape.
        mean: Mean of gradients.
        square: Mean square of gradients.
        largest: Empty, or one tensor of that shape (AMSGrad).
        step: Number of this step, from 1.
        lr: Learning rate.
        decoupled: Whether to decay weights as AdamW does.
        settings: `beta1`, `beta2`, `weight_decay`, `eps`, `maximize`.
    """
    kernel = torch.ops.aten._fused_adamw_ if decoupled else torch.ops.aten._fused_adam_
    settings = {**settings, "amsgrad": bool(largest)}
    return _run(kernel, g, [[p], [mean], [square], [*largest]], step, lr=lr, **settings)


def fused_sgd_(
    p: Tensor, g: Tensor, velocity: Sequence[Tensor], lr: Number, **settings: float | bool
) -> list[Tensor]:
    """Overwrite the parameter and its velocity, if there is one, and return them.

    Args:
        p: The parameter, floating.
        g: Its gradient, of the same shape.
        velocity: Empty, or one tensor of that shape.
        lr: Learning rate.
        settings: `momentum`, `dampening`, `weight_decay`, `nesterov`, `maximize`.
    """
    kernel = torch.ops.aten._fused_sgd_
    return _run(kernel, g, [[p], [*velocity]], None, lr=lr, is_first_step=False, **settings)


def fused_adagrad_(
    p: Tensor,
    g: Tensor,
    square: Tensor,
    step: Number | Tensor,
    lr: Number,
    **settings: float | bool,
) -> list[Tensor]:
    """Overwrite the parameter and its sum of squares, and return them.

    Args:
        p: The parameter, floating.
        g: Its gradient, of the same shape.
        square: Sum of squared gradients.
        step: Number of this step, from 1.
        lr: Learning rate.
        settings: `lr_decay`, `weight_decay`, `eps`, `maximize`.
    """
    return _run(torch.ops.aten._fused_adagrad_, g, [[p], [square]], step, lr=lr, **settings)


def _run(
    kernel: Callable[..., Any],
    g: Tensor,
    old: list[list[Tensor]],
    step: Number | Tensor | None,
    **settings: Any,
) -> list[Tensor]:
    """Run a kernel on one parameter; return the parameter and its states with their new values.

    Args:
        kernel: Takes lists of contiguous tensors, and overwrites all except `g`.
        g: The gradient.
        old: The parameter and its states, each as a list of at most one tensor.
        step: Number of the step; None if the kernel takes none.
        settings: Settings of the optimizer by name.
    """
    p = old[0][0]
    # Most tensors are contiguous: then the kernel writes directly into the returned ones.
    new = [[one if one.is_contiguous() else _copy(one) for one in part] for part in old]
    lists = [new[0], [g.to(p.dtype).contiguous()], *new[1:]]
    if isinstance(step, Tensor):
        lists.append([step.to(device=p.device, dtype=torch.float32)])
    elif step is not None:
        lists.append([torch.full((), step, dtype=torch.float32, device=p.device)])
    kernel(*lists, **settings)
    made = [one for part in old for one in part]
    for one, other in zip(made, (other for part in new for other in part), strict=True):
        if one is not other:
            one.copy_(other)
    return made


def _copy(value: Tensor) -> Tensor:
    """Return a contiguous copy, because the kernels assume contiguous tensors."""
    return value.clone(memory_format=torch.contiguous_format)


#: The in-place forms by name. They return the tensors that they overwrite.
IN_PLACE: dict[str, Callable[..., list[Tensor]]] = {
    "sbp.fused_adagrad_.default": fused_adagrad_,
    "sbp.fused_adagrad_.tensor_step": fused_adagrad_,
    "sbp.fused_adam_.default": fused_adam_,
    "sbp.fused_adam_.tensor_step": fused_adam_,
    "sbp.fused_sgd_.default": fused_sgd_,
}

#: By operator: its in-place form, how many of the first arguments are tensors, its arguments.
_SCHEMAS: dict[str, tuple[Callable[..., list[Tensor]], int, str]] = {
    "fused_adam": (
        fused_adam_,
        5,
        "(Tensor p, Tensor g, Tensor mean, Tensor square, Tensor[] largest, {step}, Scalar lr, *, "
        "Scalar beta1, Scalar beta2, Scalar weight_decay, float eps, bool maximize, "
        "bool decoupled)",
    ),
    "fused_sgd": (
        fused_sgd_,
        3,
        "(Tensor p, Tensor g, Tensor[] velocity, Scalar lr, *, Scalar momentum, Scalar dampening, "
        "Scalar weight_decay, bool nesterov, bool maximize)",
    ),
    "fused_adagrad": (
        fused_adagrad_,
        3,
        "(Tensor p, Tensor g, Tensor square, {step}, Scalar lr, *, float lr_decay, "
        "Scalar weight_decay, float eps, bool maximize)",
    ),
}

#: The overloads, by the type of the number of steps.
_STEPS = {"": "Scalar step", ".tensor_step": "Tensor step"}


def _register(name: str, in_place: Callable[..., list[Tensor]], count: int, schema: str) -> None:
    """Register the functional form of an update, which copies its arguments."""

    def copied(args: Sequence[Any], copy: Callable[[Tensor], Tensor]) -> list[Any]:
        return [[*map(copy, one)] if isinstance(one, list) else copy(one) for one in args]

    def functional(p: Tensor, g: Tensor, *rest: Any, **settings: Any) -> list[Tensor]:
        own = copied((p, *rest[: count - 2]), _copy)
        return in_place(own[0], g, *own[1:], *rest[count - 2 :], **settings)

    def shapes_only(p: Tensor, g: Tensor, *rest: Any, **_: Any) -> list[Tensor]:
        given = (p, *rest[: count - 2])
        flat = [part for one in given for part in (one if isinstance(one, list) else [one])]
        return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in flat]

    for overload, step in _STEPS.items():
        if not overload or "{step}" in schema:
            text = f"{name}{overload}{schema.format(step=step)} -> Tensor[]"
            register(text, functional, shapes_only, torch.Tag.pointwise)


for _name, _schema in _SCHEMAS.items():
    _register(_name, *_schema)
