"""Files that last: whole whenever they are there, and written past the page cache of the system.

`writing_aside` writes a file aside, syncs it, and then renames it. `DirectFile` goes from memory to
the disk, without a copy in the page cache:

    given       |   piece   |      piece      |  piece  |    the end
    gathered    |     4 MiB     |     4 MiB     |  rest  |
    disk             direct          direct     through the page cache

What a run saves it seldom reads again, and to fill the page cache and to empty it takes the
processor several times as long as a copy in memory: time that steps next to it lack. The disk takes
whole blocks only, from memory that begins at one: what is written is gathered into such.
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
        """Write what is gathered, or let go of it: after an error nothing is written twice."""
        left = memoryview(self._pages)[: self._gathered_bytes]
        self._gathered_bytes = 0
        while left:
            try:
                left = left[super().write(left) or 0 :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                # This is no whole blocks, as at the end or after a short write; or the file
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


def sync(path: Path) -> None:
    """Wait until the names in a folder would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fresh_path(path: Path) -> Path:
    """Return a path next to another that nobody could have foreseen; it is to be made, not opened.

    What had a name that is known beforehand would be written to, and a link to a file followed.
    """
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")


@contextmanager
def writing_aside(path: Path) -> Iterator[BufferedWriter]:
    """Open a file next to `path`, which takes its place at the end of the block.

    Its folder is made if it is not there.

    Whatever fails in between, `path` is what it was, and nothing else is left behind.

    Raises:
        RunError: it cannot be written, such as on a full disk.
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
