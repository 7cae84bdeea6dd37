"""One thread of Python at a time captures and plans.

PyTorch's tracing patches `nn.Module` for the whole process, and a program that is captured is
changed meanwhile, so that two captures at once would see each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let other threads that capture or plan wait until the block is over; it may be nested."""
    with _LOCK:
        yield
