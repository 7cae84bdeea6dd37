"""Memory for large results that is used again when nobody holds it any more.

Asking the system for memory and touching it for the first time takes longer than to copy into it.
What a step makes is dropped within that step and made again in the next, so the same few blocks
serve for ever.

A block belongs to whoever holds a tensor, or a view of a tensor, in it; nobody gives it back by
hand. Who holds whom:

    tensor, its views -> storage -> memoryview -> bytearray <- block <- finalizer of the memoryview

The memoryview is made for one tensor, and only its storage holds it: so it ends when the last view
of that tensor does, and its finalizer puts the block back, with a `bytearray` that never moved.
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
    """A piece of memory; compared by identity, not by content."""

    __slots__ = ("memory",)

    def __init__(self, size_bytes: int) -> None:
        self.memory = bytearray(size_bytes)


class BufferPool:
    """Blocks of memory; any number of threads may take some.

    A block comes back by itself when the last tensor that shares its memory is gone.
    """

    def __init__(self) -> None:
        #: Oldest first. A block comes back on whatever thread drops the last tensor, at any moment;
        #: where the garbage collector drops it, in the middle of a method here. A lock would then
        #: be taken twice by one thread, so there is none: appending and removing are atomic, and
        #: only copies are walked, made by `list`, in which the collector cannot run once it has
        #: begun to walk (in `tuple` it can, up to Python 3.11).
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
        view = memoryview(block.memory)
        tensor = torch.frombuffer(view, dtype=like.dtype).view(tuple(shape))
        # Not at exit: tensors that live as long as the program need no memory after it.
        weakref.finalize(view, self._give_back, block).atexit = False
        return tensor

    def clear(self) -> None:
        """Drop the blocks that nobody uses."""
        self._free.clear()

    def _take(self, size_bytes: int) -> _Block:
        """Return a block of exactly this size, one that was used last if there is any.

        The last one is the likeliest to be in the cache. Sizes recur exactly, as steps do; a larger
        block would be missed by who needs all of it.
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
        # The oldest go first: sizes that no step asks for any more.
        while sum(len(block.memory) for block in list(self._free)) > _KEPT_BYTES:
            with suppress(IndexError):  # another thread may have taken the last
                self._free.popleft()
