"""SIGINT in tests that send it: heard, whatever the tests were started by.

Stability: internal.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hears_ctrl_c"]


@contextmanager
def hears_ctrl_c() -> Iterator[None]:
    """Hear SIGINT, and let programs that are started hear it: a context, or a decorator of a test.

    What a script runs in its background ignores it otherwise.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
