"""Memory for large results that is used again when nobody holds it any more.

Asking the system for memory and touching it for the first time takes longer than to copy into it.
What a step makes is dropped within that step and made again in the next, so the same few blocks
serve for ever. Knows torch.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch

#: Bytes below which the allocator of the C library keeps what was freed by itself.
SMALLEST_BYTES = 128 * 1024

#: Bytes of blocks that nobody uses which are kept, at most.
_KEPT_BYTES = 256 * 1024 * 1024


class _Block:
    """A piece of memory, told from others by what it is and not by what it holds."""

    __slots__ = ("memory",)

    def __init__(self, size_bytes: int) -> None:
        self.memory = bytearray(size_bytes)


class Arena:
    """Blocks of memory; any number of threads may take some.

    A block comes back by itself when the last tensor that shares its memory is gone.
    """

    def __init__(self) -> None:
        #: Oldest first. Appending and removing are atomic: a block comes back on whatever thread
        #: drops the last tensor, at any moment, so no lock may be taken there.
        self._free: deque[_Block] = deque()

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor with the dtype of another, of any values, on its device.

        Args:
            shape: Of the tensor.
            like: Says dtype and device.
        """
        size_bytes = prod(shape) * like.element_size()
        if size_bytes < SMALLEST_BYTES or like.device.type != "cpu":
            return like.new_empty(tuple(shape))
        block = self._take(size_bytes)
        # Its storage holds the view, and the view the block: the end of the one is that of both.
        view = memoryview(block.memory)
        tensor = torch.frombuffer(view, dtype=like.dtype).view(tuple(shape))
        weakref.finalize(view, self._give_back, block).atexit = False
        return tensor

    def clear(self) -> None:
        """Drop the blocks that nobody uses."""
        self._free.clear()

    def _take(self, size_bytes: int) -> _Block:
        """Return a block of exactly this size, one that was used last if there is any."""
        for block in reversed(tuple(self._free)):
            if len(block.memory) == size_bytes:
                try:
                    self._free.remove(block)
                except ValueError:  # another thread was faster
                    continue
                return block
        return _Block(size_bytes)

    def _give_back(self, block: _Block) -> None:
        self._free.append(block)
        while sum(len(block.memory) for block in tuple(self._free)) > _KEPT_BYTES:
            with suppress(IndexError):  # another thread may have taken the last
                self._free.popleft()
