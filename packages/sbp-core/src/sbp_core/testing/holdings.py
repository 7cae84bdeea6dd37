"""Resources of this process (threads, open files, sockets), to test that `close` releases them.

With a `/proc`, threads and files of libraries are found, too; elsewhere only Python's threads.
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

#: Seconds that a stopped thread may take to end, and seconds between two looks.
_END_S, _PAUSE_S = 20.0, 0.005

#: The system's code for a listening socket.
_LISTENS = "0A"

#: Prefix of the names of our libraries' threads.
_OURS = "sbp-"


def holdings() -> Counter[str]:
    """Return the number of resources of each kind: `thread sbp-outbox`, `socket:[*]`, ...

    Numbers in names are replaced, because no two threads or sockets have the same.
    """
    return Counter([*_threads(), *_files()])


def listening() -> set[str]:
    """Return the addresses on which sockets of this process listen; empty without a `/proc`.

    `127.0.0.1` and `::1` are the loopback interface, `0.0.0.0` and `::` are all interfaces.
    """
    own = {entry.removeprefix("socket:") for entry in _links() if entry.startswith("socket:")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = _PROCESS / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, place, _, state, *_ = fields = line.split()
            if state == _LISTENS and f"[{fields[9]}]" in own:
                # Words of 4 bytes, each in this machine's byte order.
                words = bytes.fromhex(place.partition(":")[0])
                parts = [words[at : at + 4] for at in range(0, len(words), 4)]
                if sys.byteorder == "little":
                    parts = [part[::-1] for part in parts]
                found.add(socket.inet_ntop(family, b"".join(parts)))
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return a text about resources whose number has grown; `""` if there are none."""
    more = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(more.items()) if count > 0)


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Check that no thread of ours is alive at the end that did not exist at the begin.

    Raises:
        AssertionError: names the threads.
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
        except OSError:  # the descriptor of the listing itself, which is closed by now
            continue


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)
