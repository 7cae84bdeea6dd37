"""Tensors in memory, as what is to be written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sbp_launch.checkpoint.cover import index_of
from sbp_launch.checkpoint.tensors import LazyTensors


class Held(LazyTensors):
    """Tensors in memory that are read like those of a file."""

    def __init__(self, held: Mapping[str, Tensor] | None = None, **named: Tensor) -> None:
        self.held = {**(held or {}), **named}

    @property
    def names(self) -> Collection[str]:
        return self.held.keys()

    def like(self, name: str) -> Tensor:
        return self.held[name].to("meta")

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        return self.held[name][index_of(bounds)]


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
