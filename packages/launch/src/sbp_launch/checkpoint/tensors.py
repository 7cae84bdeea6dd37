"""Mappings of tensors in files that are read on access, whole or in slices.

Checkpoints (`reading`) and files of other libraries (`formats.indexed`) implement `LazyTensors`;
all code that loads, converts or compares tensors reads them through it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import Bounds, intersection, volume
from sbp_launch.checkpoint.cover import index_of, split_into_blocks, within

#: Largest part in bytes when a tensor is read in parts.
PART_BYTES = 64 * 2**20


class LazyTensors(Mapping[str, Tensor]):
    """A mapping of tensors that are loaded on access."""

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """The names, in the order of iteration."""

    @abstractmethod
    def like(self, name: str) -> Tensor:
        """Return a tensor on the device `meta`, with the shape and dtype but without values.

        Raises:
            KeyError: there is no such tensor.
        """

    @abstractmethod
    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return a slice as a new CPU tensor; `bounds` are (start, stop) of each dim.

        Raises:
            KeyError: there is no such tensor.
            ConfigError: it cannot be read, or is damaged.
        """

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, [(0, extent) for extent in self.like(name).shape])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names  # the default of `Mapping` would read the tensor

    def parts(self, name: str) -> Iterator[Tensor]:
        """Yield parts of at most 64 MiB, each a contiguous range of its bytes, in their order."""
        like = self.like(name)
        for bounds in split_into_blocks(like.shape, like.element_size(), PART_BYTES):
            yield self.part(name, bounds)


class StoredTensors(LazyTensors):
    """Tensors that are stored in pieces; slices are assembled from the pieces."""

    #: By name; each has `shape`, `dtype` (a name), and `pieces` with their `bounds`.
    stored: Mapping[str, Any]

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors."""
        return self.stored.keys()

    def like(self, name: str) -> Tensor:
        """See `LazyTensors.like`."""
        stored = self.stored[name]
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """See `LazyTensors.part`."""
        stored, wanted = self.stored[name], tuple(bounds)
        shape = [stop - start for start, stop in wanted]
        found = torch.empty(shape, dtype=getattr(torch, stored.dtype))
        for piece in stored.pieces:
            common = intersection(piece.bounds, wanted)
            if volume(common):
                target = found[index_of(within(common, wanted))]
                self.read(name, piece, within(common, piece.bounds), target)
        return found

    @abstractmethod
    def read(self, name: str, piece: Any, bounds: Bounds, target: Tensor) -> None:
        """Read a part of a piece into a tensor; `bounds` are relative to the piece."""


class Chosen(LazyTensors):
    """A selection of the tensors of a mapping, perhaps under other names.

    Args:
        tensors: The mapping to select from.
        names: New name -> name in `tensors`; also the attribute `sources`.
        tell: Called with the bytes of every part that was read.
    """

    def __init__(
        self,
        tensors: LazyTensors,
        names: Mapping[str, str],
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._tensors, self.sources, self._tell = tensors, dict(names), tell

    @property
    def names(self) -> Collection[str]:
        """The new names."""
        return self.sources.keys()

    def like(self, name: str) -> Tensor:
        """See `LazyTensors.like`."""
        return self._tensors.like(self.sources[name])

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """See `LazyTensors.part`."""
        found = self._tensors.part(self.sources[name], bounds)
        self._tell(size_bytes(found))
        return found


def size_bytes(like: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return like.numel() * like.element_size()


def dtype_name(like: Tensor) -> str:
    """Return the name of a tensor's dtype: `float32`."""
    return str(like.dtype).removeprefix("torch.")


def bytes_of(value: Tensor) -> memoryview:
    """Return the elements in row-major order; without a copy if they are so on the CPU."""
    # To the CPU first: a copy on the device would need memory there.
    flat = value.detach().cpu().contiguous().reshape(-1)
    # A single element counts as contiguous whatever its stride is, but `view` needs stride 1.
    flat = flat.as_strided(flat.shape, (1,)).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view
