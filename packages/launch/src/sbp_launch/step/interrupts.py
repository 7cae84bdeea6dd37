"""Delay Ctrl-C in a user's training loop until the step is complete, so that states stay usable.

| ranks are | first Ctrl-C | second Ctrl-C |
|---|---|---|
| threads | raised when the interrupted call is done | raised at once |
| processes | raised in all of them, before the next step or evaluation | raised at once |

In the code of the loop itself, it is raised at once if ranks are threads. Processes have to agree
on it, so that all of them stop after the same step. A second Ctrl-C aborts the step, unless its
update has begun, and ends the session; the states have their values from a complete step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from sbp_core.interrupts import HeldInterrupts


def until_done() -> HeldInterrupts:
    """Return a context manager that holds the first interrupt until its block ends."""
    return HeldInterrupts(_reporter("when this call is done"), most=1)


def until_all_agree(*, tells: bool) -> HeldInterrupts:
    """Return a context manager that holds the first Ctrl-C until all processes raise it.

    Args:
        tells: Whether this process prints that Ctrl-C is held.
    """
    heard = _reporter("in all processes, before the next step or evaluation") if tells else None
    return HeldInterrupts(heard, most=1, signals=[signal.SIGINT])


def _reporter(when: str) -> Callable[[BaseException], None]:
    def tell(error: BaseException) -> None:
        # Bypass Python's buffers: the signal may have arrived during a print.
        with suppress(OSError):
            name = type(error).__name__
            os.write(2, f"\n{name}: raised {when} (a second one is raised at once)\n".encode())

    return tell
