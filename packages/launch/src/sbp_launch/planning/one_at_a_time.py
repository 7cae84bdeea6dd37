"""A lock: one Python thread at a time captures and plans.

PyTorch's tracing patches `nn.Module` for the whole process, and a capture temporarily changes its
program, so two captures at once would disturb each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Make other threads that capture or plan wait until the block ends; may be nested."""
    with _LOCK:
        yield
