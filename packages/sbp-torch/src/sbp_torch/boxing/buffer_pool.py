"""`BufferPool`: memory for large results of collectives among threads (`local`), which is reused.

Allocating memory and touching it for the first time takes longer than copying into it. The results
of a step are dropped within that step and made again in the next one, so a few blocks serve all
steps.

A block is in use while a tensor, or a view of it, is alive; it returns to the pool automatically.
The references are:

    tensor, its views -> storage -> memoryview -> bytearray <- block <- finalizer of the memoryview

The memoryview is made for one tensor, and only its storage refers to it. So it dies with the last
view of that tensor, and its finalizer returns the block, whose `bytearray` was never moved.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch

#: Bytes below which the allocator of the C library itself keeps and reuses freed memory.
SMALLEST_BYTES = 128 * 1024

#: The greatest number of bytes of unused blocks that the pool keeps.
_KEPT_BYTES = 256 * 1024 * 1024


class _Block:
    """A block of memory, compared by identity, not by content."""

    __slots__ = ("memory",)

    def __init__(self, size_bytes: int) -> None:
        self.memory = bytearray(size_bytes)


class BufferPool:
    """A thread-safe pool of memory blocks.

    A block returns to the pool when the last tensor that shares its memory is freed.
    """

    def __init__(self) -> None:
        #: Unused blocks, oldest first. A block returns on the thread that drops the last tensor, at
        #: any moment; the garbage collector may do so in the middle of a method of this class. One
        #: thread would then take a lock twice, so there is no lock. Appending and removing are
        #: atomic, and only copies made by `list` are iterated: the collector cannot run while
        #: `list` iterates (in `tuple` it can, up to Python 3.11).
        self._free: deque[_Block] = deque()

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized contiguous tensor with the dtype and device of another one.

        Args:
            shape: Shape of the tensor.
            like: A tensor of the same dtype and device.
        """
        size_bytes = prod(shape) * like.element_size()
        if size_bytes < SMALLEST_BYTES or like.device.type != "cpu":
            return like.new_empty(tuple(shape))
        block = self._take(size_bytes)
        view = memoryview(block.memory)
        tensor = torch.frombuffer(view, dtype=like.dtype).view(tuple(shape))
        # Not at exit: a tensor that lives until the exit of the program returns no memory.
        weakref.finalize(view, self._give_back, block).atexit = False
        return tensor

    def clear(self) -> None:
        """Free the unused blocks."""
        self._free.clear()

    def _take(self, size_bytes: int) -> _Block:
        """Return a block of exactly this size: the most recently used one, or a new one.

        The most recent one is the most likely to be in the cache. Every step asks for the same
        sizes, so a larger block is left for the tensor that needs all of it.
        """
        for block in reversed(list(self._free)):
            if len(block.memory) == size_bytes:
                try:
                    self._free.remove(block)
                except ValueError:  # another thread was faster
                    continue
                return block
        return _Block(size_bytes)

    def _give_back(self, block: _Block) -> None:
        self._free.append(block)
        # Free the oldest blocks first: no step asks for their sizes any more.
        while sum(len(block.memory) for block in list(self._free)) > _KEPT_BYTES:
            with suppress(IndexError):  # another thread may have taken the last block
                self._free.popleft()
