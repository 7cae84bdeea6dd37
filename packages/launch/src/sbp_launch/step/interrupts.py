"""Ctrl-C in a user's training loop: it waits until the step is complete, and the session goes on.

| ranks are | the first one | the second one |
|---|---|---|
| threads | is raised when the call that it came into is done | is raised at once |
| processes | is raised in all of them, before the next step or evaluation | is raised at once |

In the code of the loop itself, it is raised at once where ranks are threads. Processes have to
agree on it, so that all of them stop after the same step. A second Ctrl-C aborts the step, unless
its update has begun, and ends the session; the states are those of a complete step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from sbp_core.interrupts import HeldInterrupts


def until_done() -> HeldInterrupts:
    """Return what holds the first interrupt in a block, until that is over."""
    return HeldInterrupts(_reporter("when this call is done"), most=1)


def until_all_agree(*, tells: bool) -> HeldInterrupts:
    """Return what holds the first Ctrl-C in a block, until all processes raise it.

    Args:
        tells: Whether this process says so.
    """
    heard = _reporter("in all processes, before the next step or evaluation") if tells else None
    return HeldInterrupts(heard, most=1, signals=[signal.SIGINT])


def _reporter(when: str) -> Callable[[BaseException], None]:
    def tell(error: BaseException) -> None:
        # Past Python's buffers: the signal may have come in the middle of a print.
        with suppress(OSError):
            name = type(error).__name__
            os.write(2, f"\n{name}: raised {when} (once more: at once)\n".encode())

    return tell
