"""What happens to gradients between backward pass and optimizer: unscaling, clipping, checks.

Norms are roots of sums, the sums added up parameter by parameter in the order of the model: parts
of tensors then need one all-reduce of one number, whatever they are cut by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

#: Added to the norm before it divides, as `torch.nn.utils.clip_grad_norm_` does.
_EPS = 1e-6

Gradients = dict[str, Tensor]


def wide(value: Tensor) -> Tensor:
    """Return the tensor in float32 if it has fewer bits: sums of squares leave half precision."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def total_norm(tensors: Iterable[Tensor], order: float) -> Tensor:
    """Return the norm of all elements of all tensors, a 0-d tensor.

    Args:
        tensors: Floating or complex, of any shapes; at least one.
        order: > 0 and not NaN; infinity for the largest absolute value.
    """
    values = [tensor.abs() if tensor.is_complex() else wide(tensor) for tensor in tensors]
    if math.isinf(order):
        total = values[0].abs().amax()
        for value in values[1:]:
            total = torch.maximum(total, value.abs().amax())
        return total
    if order == 2.0:
        return _sum((value * value).sum() for value in values).sqrt()
    return _sum(value.abs().pow(order).sum() for value in values).pow(1.0 / order)


def _sum(parts: Iterable[Tensor]) -> Tensor:
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


def clip_by_norm(gradients: Gradients, norm: Tensor, max_norm: float) -> Gradients:
    """Scale all gradients so that their norm is at most `max_norm`, as `clip_grad_norm_` does."""
    factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
    return {name: (value * factor).to(value.dtype) for name, value in gradients.items()}


def clip_by_value(gradients: Gradients, bound: float) -> Gradients:
    """Cut every element to [-bound, bound], as `clip_grad_value_` does."""
    return {name: value.clamp(min=-bound, max=bound) for name, value in gradients.items()}


def unscaled(gradients: Gradients, scale: Tensor) -> Gradients:
    """Divide gradients by the scale of the loss, a 0-d float32 tensor, as `GradScaler` does."""
    inverse = scale.double().reciprocal().float()
    return {name: (value * inverse).to(value.dtype) for name, value in gradients.items()}


def is_overflow(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return whether any element is infinite or NaN: a 0-d boolean tensor."""
    finite = _sum((value.abs() < math.inf).sum() for value in gradients.values())
    return finite != sum(value.numel() for value in gradients.values())
