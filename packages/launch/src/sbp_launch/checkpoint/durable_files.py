"""Write files atomically and durably, or directly to the disk without the page cache.

`writing_aside` writes a temporary file, syncs it, and renames it. `DirectFile`, which checkpoints
use, writes from memory to the disk without a copy in the page cache:

    writes      |   piece   |      piece      |  piece  |    the end
    buffer      |     4 MiB     |     4 MiB     |  rest  |
    disk             direct          direct     through the page cache

A run seldom reads what it has saved. To fill the page cache and to flush it takes several times as
much CPU time as a copy in memory, and concurrent training steps lack this time. Direct writes need
whole blocks of the disk in aligned memory, so data are gathered in such a buffer first.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sbp_core.errors import RunError

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: Size of the buffer in bytes: many blocks of any disk.
GATHERED_BYTES = 4 * 2**20

#: Flag of `open` for direct writes; 0 on systems without them.
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile(FileIO):
    """A new file, written sequentially, with direct writes where the file system has them.

    Args:
        path: Path of the file, which must not exist.

    Raises:
        OSError: the file cannot be created; from `write`, `flush` and `close`: cannot be written.
    """

    def __init__(self, path: Path) -> None:
        # Before the file is open: `close` uses the buffer.
        self._pages = mmap.mmap(-1, GATHERED_BYTES)
        self._gathered = np.frombuffer(self._pages, np.uint8)
        self._gathered_bytes = 0
        self._is_direct = False
        super().__init__(path, "xb")
        self._turn(is_direct=True)

    def write(self, data: Buffer) -> int:
        """Write bytes, now or in `flush`; return their number."""
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
        """Write the contents of the buffer."""
        self._put()

    def _put(self) -> None:
        """Write the buffer, and empty it even on an error, so that nothing is written twice."""
        left = memoryview(self._pages)[: self._gathered_bytes]
        self._gathered_bytes = 0
        while left:
            try:
                left = left[super().write(left) or 0 :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                # The rest is not a whole number of blocks, as at the end or after a short write;
                # or the file system reports only now that it has no direct writes.
                self._turn(is_direct=False)

    def _turn(self, *, is_direct: bool) -> None:
        """Switch direct writes on or off; they stay off where the system has none."""
        flags = fcntl.fcntl(self, fcntl.F_GETFL) & ~_DIRECT
        try:
            fcntl.fcntl(self, fcntl.F_SETFL, flags | (_DIRECT if is_direct else 0))
        except OSError:
            is_direct = False
        self._is_direct = is_direct


def sync(path: Path) -> None:
    """Sync a folder, so that the names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fresh_path(path: Path) -> Path:
    """Return an unpredictable path in the same folder, for a new temporary file.

    With a predictable name, somebody could put a file or a link there that would be written to.
    """
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")


@contextmanager
def writing_aside(path: Path) -> Iterator[BufferedWriter]:
    """Open a temporary file, which replaces `path` at the end of the block.

    The folder is created if it does not exist.

    After an error in the block, `path` is unchanged, and the temporary file is removed.

    Raises:
        RunError: the file cannot be written, for example because the disk is full.
    """
    aside = fresh_path(path)
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        sync(path.parent)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}",
            todo="make room, or name another place",
        ) from error
