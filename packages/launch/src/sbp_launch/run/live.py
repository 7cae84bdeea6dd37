"""A socket of each process of a run, `RUN/logs/status_RANK.sock`, that tells what it is at.

It costs a run nothing that nobody asks: the thread that hears status signals waits for it, too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sbp_core.errors import SbpError

#: An address of a socket holds a few more bytes than that.
_MOST_BYTES = 100

#: Most seconds that a process may take to answer, and somebody who asks to listen.
_WAIT_S = 2.0


def listen(path: Path) -> socket.socket | None:
    """Return a socket that listens at a path, for this user alone.

    A file that an earlier run has left there is replaced. None if there can be no socket, as on
    some network storages, or on Windows.
    """
    if not hasattr(socket, "AF_UNIX"):
        return None
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with _address(path) as address:
            made.bind(address)
        path.chmod(0o600)
        made.listen()
    except OSError:
        made.close()
        return None
    return made


def answer(listener: socket.socket, lines: list[str]) -> None:
    """Tell the one who has connected some lines; whoever does not listen is left alone."""
    with suppress(OSError), listener.accept()[0] as asking:
        asking.settimeout(_WAIT_S)
        asking.sendall("\n".join(lines).encode())


def ask(path: Path) -> list[str]:
    """Return what the process at a socket says.

    Raises:
        SbpError: it does not answer.
    """
    try:
        with _address(path) as address, socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_WAIT_S)
            asking.connect(address)
            parts = list(iter(lambda: asking.recv(1 << 16), b""))
    except OSError as error:
        raise SbpError(
            f"no answer: {error.strerror or error}",
            where=str(path),
            accepted="a process of this machine that has not ended",
        ) from error
    return b"".join(parts).decode().splitlines()


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield an address of a file that is short enough, however long the names of its folders."""
    if len(os.fsencode(path)) <= _MOST_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
