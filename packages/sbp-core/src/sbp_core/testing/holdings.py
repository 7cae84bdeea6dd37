"""What this process holds of the system: threads and open files, sockets among them.

By these a test sees whether something that was closed has let go of all it had. Where there is a
`/proc`, threads and files of libraries are seen, too; elsewhere the threads of Python alone.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["grown", "holdings", "listening"]

_PROCESS = Path("/proc/self")

#: Seconds that a thread, which was told to end, gets to do so, and between two looks.
_END_S, _PAUSE_S = 20.0, 0.005

#: How the system writes that a socket listens.
_LISTENS = "0A"

#: How the names of the threads of our libraries begin.
_OURS = "sbp-"


def holdings() -> Counter[str]:
    """Return how many of each kind this process holds: `thread sbp-outbox`, `socket:[*]`, ...

    Numbers in names are left out, because no two threads or sockets have the same.
    """
    return Counter([*_threads(), *_files()])


def listening() -> set[str]:
    """Return the addresses that sockets of this process listen on; empty without a `/proc`.

    `127.0.0.1` and `::1` are the loopback interface, `0.0.0.0` and `::` are all interfaces.
    """
    own = {entry.removeprefix("socket:") for entry in _links() if entry.startswith("socket:")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = _PROCESS / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, place, _, state, *_ = fields = line.split()
            if state == _LISTENS and f"[{fields[9]}]" in own:
                # Words of 4 bytes, each as this machine keeps numbers.
                words = bytes.fromhex(place.partition(":")[0])
                parts = [words[at : at + 4] for at in range(0, len(words), 4)]
                if sys.byteorder == "little":
                    parts = [part[::-1] for part in parts]
                found.add(socket.inet_ntop(family, b"".join(parts)))
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return of what there is more than before, in words; `""` if of nothing."""
    more = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(more.items()) if count > 0)


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Check that no thread of ours is alive at the end that was not there before.

    Raises:
        AssertionError: names them.
    """
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + _END_S
    while left := [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith(_OURS)
    ]:
        assert time.monotonic() < end, f"threads are left: {', '.join(left)}"
        time.sleep(_PAUSE_S)


def _threads() -> Iterator[str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in sorted((_PROCESS / "task").glob("*")):
        try:
            name = names.pop(int(task.name), "") or (task / "comm").read_text().strip()
        except OSError:  # it has just ended
            continue
        yield f"thread {_without_numbers(name)}"
    for name in names.values():
        yield f"thread {_without_numbers(name)}"


def _files() -> Iterator[str]:
    return map(_without_numbers, _links())


def _links() -> Iterator[str]:
    for entry in sorted((_PROCESS / "fd").glob("*")):
        try:
            yield str(entry.readlink())
        except OSError:  # what lists them is one of them, and closed by now
            continue


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)
