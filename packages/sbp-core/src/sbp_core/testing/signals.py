"""Signals in tests that send them: heard, whatever the tests were started by."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["hears_signals"]


@contextmanager
def hears_signals() -> Iterator[None]:
    """Hear SIGINT and SIGHUP, and let programs that are started hear them.

    A context, or a decorator of a test. What a script runs in its background ignores SIGINT
    otherwise, and what runs under `nohup` ignores SIGHUP.
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
