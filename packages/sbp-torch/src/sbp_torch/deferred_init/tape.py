"""What a constructor did: its operators in order, as writes to numbered storages.

A tensor is a window on a storage, so views need no entry: whoever uses one names storage, size,
stride and offset. An entry is an operator that makes storages or writes to them.

    w = torch.empty(2, 3)        no entry: nobody relies on its values
    w.uniform_(-1, 1)            entry 0  uniform_   covers 0            event 0
    w[0].mul_(2)                 entry 1  mul_       writes 0, reads 0
    b = w.sum(1)                 entry 2  sum        makes 1, reads 0

Events are what happens to PyTorch's default generator, in order: a draw, or a state that the
constructor set. Position `n` is the moment before event `n`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor

from sbp_torch._torch_compat import storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A tensor as a part of a storage.

    Args:
        storage: Its number on the tape.
        dtype: Of the elements.
        size: Of each dim.
        stride: Of each dim, in elements.
        offset: Of the first element, in elements.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.size).numel()

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor, on a storage that has its values."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class OwnGenerator:
    """Stands in the arguments of an entry for a generator of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapeEntry:
    """One operator.

    Args:
        op: An operator, or a function that fills its first argument with random numbers.
        args: With a `Window` for every tensor.
        kwargs: Likewise.
        made: For every tensor among the results its window, if its storage is new; else None.
        reads: Storages whose values matter.
        writes: Storages that are changed or made.
        covers: Of these, those of which no old value is left.
        default: The default dtype at that time.
        event: Number of the draw from the default generator; None if there is none.
        generator: State of a generator of the user's own, before the op draws from it.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[Window | None, ...] = ()
    reads: frozenset[int]
    writes: frozenset[int]
    covers: frozenset[int]
    default: torch.dtype
    event: int | None = None
    generator: Tensor | None = None

    @property
    def touches(self) -> frozenset[int]:
        """All storages of the entry."""
        return self.reads | self.writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """An event: the generator is set back to what it was at a position."""

    position: int


#: An event: the number of an entry that draws, a state that is set, or a return to an earlier one.
Event = int | Tensor | Return


@dataclass(slots=True, kw_only=True)
class Tape:
    """The entries and events of a constructor, and its storages.

    Args:
        seed: Of the default generator before the first entry.
    """

    seed: int
    entries: list[TapeEntry] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    #: By number: the bytes of each storage.
    sizes: list[int] = field(default_factory=list)
    #: By number: storages that have values from outside of the tape.
    constants: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    #: By number of a storage: the entries that write to it, in order.
    writers: dict[int, list[int]] = field(default_factory=dict)
    #: Numbers by key; the storages without data live as long, so that no key is given out twice.
    _numbers: dict[int, tuple[int, torch.UntypedStorage]] = field(default_factory=dict)

    def append(self, entry: TapeEntry) -> None:
        """Add an entry."""
        if entry.event is not None:
            assert entry.event == len(self.events), "a draw is the next event"
            self.events.append(len(self.entries))
        for storage in entry.writes:
            self.writers.setdefault(storage, []).append(len(self.entries))
        self.entries.append(entry)

    def window(self, tensor: Tensor) -> Window:
        """Return a tensor without data as a window; its storage gets a number if it has none."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in self._numbers:
            self._numbers[key] = (len(self.sizes), storage)
            self.sizes.append(0)
        number = self._numbers[key][0]
        self.sizes[number] = max(self.sizes[number], storage.nbytes())
        return Window(
            storage=number,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def is_whole(self, window: Window) -> bool:
        """Whether a window shows every element of its storage."""
        return window.numel * window.dtype.itemsize == self.sizes[window.storage] and _is_dense(
            window
        )

    def needed(self, storages: Collection[int], end: int | None = None) -> list[int]:
        """Return the entries before `end` on which the values of storages depend, in order.

        Goes back from entry to entry with the storages that are live, which means whose values are
        still to be explained, as a compiler looks for dead code: a write to a live one is needed,
        what it reads is live before it, and what it covers is not.
        """
        live, found = set(storages), list[int]()
        # The last write to each live storage, latest first: other entries are not looked at.
        waiting = [-number for storage in live for number in self._last_write(storage, end)]
        heapify(waiting)
        while waiting:
            number = -heappop(waiting)
            entry = self.entries[number]
            if found[-1:] == [number]:  # it writes to two that are live
                continue
            found.append(number)
            live = (live - entry.covers) | entry.reads
            for storage in entry.touches & live:
                for earlier in self._last_write(storage, number):
                    heappush(waiting, -earlier)
        return found[::-1]

    def _last_write(self, storage: int, end: int | None) -> list[int]:
        """Return the last entry before `end` that writes to a storage, if there is one."""
        writers = self.writers.get(storage, [])
        at = len(writers) if end is None else bisect_left(writers, end)
        return writers[at - 1 : at] if at else []


def _is_dense(window: Window) -> bool:
    """Whether no two elements of a window share memory and there are no gaps."""
    expected = 1
    for stride, size in sorted(zip(window.stride, window.size, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
