"""What a mask chooses, if it is made of sizes alone: its shape is known when a step is captured.

before: aten.index.Tensor(x, [mask])      mask = ~torch.eye(3, dtype=torch.bool): a shape by value
after:  rows, columns = aten.nonzero_static(mask, size=6).unbind(1)
        aten.index.Tensor(x, [rows, columns])

Such masks are real tensors in a trace, so that it can count what they choose. What follows from the
batch or a state has no values there, and is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sbp_torch._torch_compat import FakeTensor, OpOverload, without_modes

_aten = torch.ops.aten

#: Their second argument is a list of indices, some of which may be masks.
_BY_INDICES = (
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._unsafe_index_put.default,
    _aten._index_put_impl_.default,
)

#: They find positions, which are counted here and found in each step.
_COUNTED = (_aten.index.Tensor, _aten.masked_select.default, _aten.nonzero.default)


def chosen_by_constants(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpOverload, Sequence[Any], Mapping[str, Any]]:
    """Return a call that does the same with a shape that is known, where a mask has values."""
    if func is _aten.masked_select.default and _is_constant(args[1]):
        value, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call] # torch's
        func, args = _aten.index.Tensor, (value, [mask])
    if func is _aten.nonzero.default and _is_constant(args[0]):
        return _aten.nonzero_static.default, args, {"size": _count(args[0])}
    if func not in _BY_INDICES or not any(map(_is_mask, args[1])):
        return func, args, kwargs
    indices: list[Tensor | None] = []
    for one in args[1]:
        if not _is_mask(one):
            indices.append(one)
        elif args[0].shape[len(indices) :][: one.dim()] == one.shape:
            indices += _positions(one)
        else:  # as PyTorch says it, which does not look here for all of them
            raise IndexError(
                f"the shape of the mask {[*one.shape]} at index {len(indices)} does not match the "
                f"shape of the indexed tensor {[*args[0].shape]}"
            )
    return func, (args[0], indices, *args[2:]), kwargs


def found_in_constants(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return what an operator finds whose result is a constant of the graph; else None."""
    if torch.Tag.dynamic_output_shape not in func.tags or func in _COUNTED:
        return None
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if not given or not all(map(_is_constant, given)):
        return None
    with without_modes():
        return func(*args, **kwargs)


def _is_constant(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _is_mask(value: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return _is_constant(value) and value.dtype in masks and value.dim() > 0


def _count(mask: Tensor) -> int:
    with without_modes():
        return int(mask.count_nonzero())


def _positions(mask: Tensor) -> tuple[Tensor, ...]:
    found: Tensor = _aten.nonzero_static.default(mask, size=_count(mask))
    return found.unbind(1)
