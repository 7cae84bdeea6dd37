"""What this process holds of the system: threads and open files, sockets among them.

By these a test sees whether something that was closed has let go of all it had. Where there is a
`/proc`, threads and files of libraries are seen, too; elsewhere the threads of Python alone.

Stability: internal.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["grown", "holdings"]

_PROCESS = Path("/proc/self")

#: Seconds that a thread, which was told to end, gets to do so, and between two looks.
_END_S, _PAUSE_S = 20.0, 0.005

#: How the names of the threads of our libraries begin.
_OURS = "sbp-"


def holdings() -> Counter[str]:
    """Return how many of each kind this process holds: `thread sbp-outbox`, `socket:[*]`, ...

    Numbers in names are left out, as no two threads or sockets have the same.
    """
    return Counter([*_threads(), *_files()])


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
    for entry in sorted((_PROCESS / "fd").glob("*")):
        try:
            yield _without_numbers(str(entry.readlink()))
        except OSError:  # what lists them is one of them, and closed by now
            continue


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)
