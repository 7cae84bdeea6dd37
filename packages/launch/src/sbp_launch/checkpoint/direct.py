"""Files that go from memory to the disk, without a copy in the page cache of the system.

    given       |   piece   |      piece      |  piece  |    the end
    gathered    |     4 MiB     |     4 MiB     |  rest  |
    disk             direct          direct     through the page cache

What a run saves it seldom reads again, and to fill the page cache and to empty it takes the
processor several times as long as a copy in memory: time that steps beside it lack. The disk takes
whole blocks only, from memory that begins at one: what is written is gathered into such.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Bytes that are written at a time: many blocks of any disk.
GATHERED_BYTES = 4 * 2**20

#: What opens a file for such writes; 0 where the system has none.
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile(FileIO):
    """A new file, written from its beginning to its end.

    Args:
        path: Where; nothing is there.

    Raises:
        OSError: it cannot be made; of `write`, `flush` and `close`: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        # Before it is open, as closing it looks at them.
        self._pages = mmap.mmap(-1, GATHERED_BYTES)
        self._gathered = np.frombuffer(self._pages, np.uint8)
        self._gathered_bytes = 0
        self._is_direct = False
        super().__init__(path, "xb")
        self._turn(is_direct=True)

    def write(self, data: Buffer) -> int:
        """Write all of some bytes, now or by `flush`; return how many these are."""
        given = memoryview(data)
        left = np.frombuffer(given, np.uint8)
        while left.size:
            room = self._gathered[self._gathered_bytes :][: left.size]
            np.copyto(room, left[: room.size])  # other threads run meanwhile
            self._gathered_bytes += room.size
            left = left[room.size :]
            if self._gathered_bytes == GATHERED_BYTES:
                self._put()
        return given.nbytes

    def flush(self) -> None:
        """Write what is gathered."""
        self._put()

    def _put(self) -> None:
        """Write what is gathered, or let go of it: behind an error nothing is written twice."""
        left = memoryview(self._pages)[: self._gathered_bytes]
        self._gathered_bytes = 0
        while left:
            try:
                left = left[super().write(left) or 0 :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                # This is no whole blocks, as at the end or behind a short write; or the file
                # system says only now that it has no such writes.
                self._turn(is_direct=False)

    def _turn(self, *, is_direct: bool) -> None:
        """Have writes go past the page cache or through it; the latter where there is no other."""
        flags = fcntl.fcntl(self, fcntl.F_GETFL) & ~_DIRECT
        try:
            fcntl.fcntl(self, fcntl.F_SETFL, flags | (_DIRECT if is_direct else 0))
        except OSError:
            is_direct = False
        self._is_direct = is_direct
