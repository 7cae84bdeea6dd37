"""Tensors in memory, as what is to be written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Held(dict[str, Tensor]):
    """A mapping with what writers ask of one."""

    def like(self, name: str) -> Tensor:
        """Return the shape and dtype, without values."""
        return self[name].to("meta")

    def part(self, name: str, bounds: Any) -> Tensor:
        """Return a slice."""
        return self[name][tuple(slice(*dim) for dim in bounds)].clone()


def values(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return a tensor of a dtype with values that differ."""
    count = torch.Size(shape).numel()
    if dtype == "bool":
        return (torch.arange(count) % 2 == 0).reshape(shape)
    return torch.arange(count).to(getattr(torch, dtype)).reshape(shape)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether shapes, dtypes and all bits are equal."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
