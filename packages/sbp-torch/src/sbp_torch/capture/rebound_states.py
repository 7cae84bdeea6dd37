"""States that a forward binds to other tensors, and states that share memory: which may do so.

A buffer may be assigned a detached tensor of its form, which then is its new value. Parameters stay
the tensors that they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_torch._torch_compat import storage_key


def replaced_states(
    own: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Any],
    storages: Mapping[str, int],
) -> dict[str, Tensor]:
    """Return the tensors that a forward assigned to the names of states.

    Args:
        own: The model's states by name.
        before: What stood for them in the forward.
        after: What the modules held in their places at the end.
        storages: The storage of each of `before`, before the forward.

    Raises:
        CaptureError: a parameter, or a tensor of another form or that is another state, too, was
            assigned; or the forward assigned to `.data`, or called backward.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in before.items():
        new = after[name]
        if tensor.is_leaf and tensor.grad is not None:
            raise CaptureError(
                f"the loss function calls backward(): {name!r} has a gradient before the backward "
                "phase",
                accepted="loss functions that return the loss",
                todo="leave .backward() out; for gradients within the loss take "
                "torch.autograd.grad(..., create_graph=True)",
            )
        if new is not tensor:
            _check_replaced(name, own[name], new)
            found[name] = new
        elif storage_key(tensor) != storages[name]:
            raise CaptureError(
                f"the forward assigns to {name}.data",
                accepted="states that are changed in place",
                todo=f"write {name}.copy_(...) under torch.no_grad()",
            )
    final = {name: storage_key(found.get(name, tensor)) for name, tensor in before.items()}
    for name in found:
        for other, key in final.items():
            if other != name and key == final[name]:
                raise CaptureError(
                    f"the forward makes {name!r} the same tensor as {other!r}",
                    accepted="buffers with memory of their own",
                    todo=f"assign a copy: .clone(), or {name}.copy_(...)",
                )
    return found


def _check_replaced(name: str, before: Tensor, after: Any) -> None:
    """Refuse what the forward may not put in the place of a state."""
    if isinstance(before, nn.Parameter):
        raise CaptureError(
            f"the forward puts another tensor in the place of the parameter {name!r}",
            accepted="parameters that stay the same tensors; assigned buffers",
            todo=f"compute with a local tensor, or write {name}.copy_(...) under torch.no_grad()",
        )
    form = (after.shape, after.dtype) if isinstance(after, Tensor) else type(after).__name__
    if form != (before.shape, before.dtype):
        got = f"{after.dtype} of shape {tuple(after.shape)}" if isinstance(after, Tensor) else form
        raise CaptureError(
            f"the forward puts {got} in the place of the buffer {name!r}, which is "
            f"{before.dtype} of shape {tuple(before.shape)}",
            accepted="a tensor of the same shape and dtype",
            todo="register the buffer with the shape and dtype that it is to keep",
        )


def shared_memory(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of states that are two tensors with elements in common."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel():
            groups.setdefault(storage_key(tensor), []).append(name)
    pairs = [
        (first, second)
        for names in groups.values()
        for at, first in enumerate(names)
        for second in names[at + 1 :]
    ]
    return [pair for pair in pairs if _overlap(tensors[pair[0]], tensors[pair[1]])]


def _overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors on one storage have an element in common."""
    (start, end), (first, last) = _extent(left), _extent(right)
    if end <= first or last <= start:
        return False
    if left.dtype != right.dtype:
        return True
    size = left.dtype.itemsize
    seen = torch.zeros(max(end, last) // size, dtype=torch.bool)
    seen.as_strided(left.shape, left.stride(), left.storage_offset()).fill_(True)
    return bool(seen.as_strided(right.shape, right.stride(), right.storage_offset()).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.dtype.itemsize
    return start * size, (start + last + 1) * size
