"""Files that are whole whenever they are there: written aside, synced, and then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from sbp_core.errors import RunError
from sbp_launch.checkpoint.local import sync


def fresh_path(path: Path) -> Path:
    """Return a path beside another that nobody could have foreseen; it is to be made, not opened.

    What had a name that is known beforehand would be written to, and a link to a file followed.
    """
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")


@contextmanager
def writing_aside(path: Path) -> Iterator[BufferedWriter]:
    """Open a file beside `path`, which takes its place at the end of the block.

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
