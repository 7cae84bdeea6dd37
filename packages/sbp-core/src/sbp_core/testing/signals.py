"""Restore the default handling of SIGINT and SIGHUP in tests that send these signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["hears_signals"]


@contextmanager
def hears_signals() -> Iterator[None]:
    """Handle SIGINT and SIGHUP, in this process and in programs that it starts.

    A context, or a decorator of a test. Otherwise, processes that a script runs in its background
    ignore SIGINT, and processes under `nohup` ignore SIGHUP.
    """
    heard: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler}
    if hasattr(signal, "SIGHUP"):
        heard[signal.SIGHUP] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
