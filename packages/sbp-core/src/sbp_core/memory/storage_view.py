"""How a tensor lies in memory, as values: strides, storage, offset."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sbp_core.graph.ir import ITEMSIZE

#: A host number.
Number = float | int


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """Shape, strides and offset (all in elements) and dtype name of a tensor in its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, each counted once."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie row by row without gaps."""
        return not self.size_bytes or all(
            extent == 1 or stride == wanted
            for extent, stride, wanted in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor in one of a rank's storages, which are numbered."""

    layout: StridedLayout
    storage: int
    storage_bytes: int


#: What memory knows of a value: how it lies, or a host number itself.
Value = StorageView | Number


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """How one result of an instruction lies in memory, and on whose storage.

    Args:
        layout: How, in its storage.
        source: Which argument's storage it lies in, counted over distinct argument names; -1 if in
            a new one.
        fresh: Which of the instruction's new storages; -1 if in none.
        storage_bytes: Of that storage.
    """

    layout: StridedLayout
    source: int
    fresh: int
    storage_bytes: int


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def contiguous(shape: tuple[int, ...], dtype: str) -> StridedLayout:
    """Return how a contiguous tensor lies at the start of its storage."""
    return StridedLayout(shape, contiguous_strides(shape), 0, dtype)
