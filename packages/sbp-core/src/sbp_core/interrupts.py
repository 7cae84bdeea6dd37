"""Deferred interrupts: exceptions of signal handlers are raised at the end of a block.

Python runs signal handlers in the main thread, between any two of its instructions. So their
exceptions, such as the `KeyboardInterrupt` of Ctrl-C, may separate two changes that belong
together. Inside the block handlers run as usual, but their exceptions are raised at its end:

    with HeldInterrupts():
        take_step()               <- Ctrl-C: noted
        count_it()
                                  -> KeyboardInterrupt
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Self

__all__ = ["HeldInterrupts"]

#: Signals for which user programs install handlers that raise; Windows lacks most of them.
_NAMES = ("ALRM", "HUP", "INT", "PROF", "TERM", "USR1", "USR2", "VTALRM")
_NUMBERS = tuple(getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}"))


class HeldInterrupts:
    """Holds the exceptions of signal handlers until the `with` block ends, then raises the first.

    Blocks may be nested. Outside the main thread a block does nothing, because no handler runs
    there.

    Args:
        heard: Called by the handler with each exception that is held.
        most: The number of exceptions to hold; the next one is raised at once. None holds all.
        signals: The signals whose handlers are wrapped; None for all.

    Attributes:
        error: The first exception that is held.
    """

    def __init__(
        self,
        heard: Callable[[BaseException], None] | None = None,
        most: int | None = None,
        signals: Iterable[int] | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._heard, self._most = heard, most
        self._numbers = _NUMBERS if signals is None else tuple(signals)
        self._before: dict[int, Any] = {}
        self._num_held, self._holds = 0, False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._hear)
            # Last: an exception before this line ends the block without `__exit__`, and wrappers
            # that stay installed have to pass exceptions on.
            self._holds = True
        return self

    def __exit__(self, *raised: object) -> None:
        self._holds = False
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
        self.raise_held()

    def raise_held(self) -> None:
        """Raise the exception that is held now, if there is one.

        Raises:
            BaseException: raised by a handler.
        """
        error, self.error, self._num_held = self.error, None, 0
        if error is not None:
            raise error

    def _hear(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            if not self._holds or self._num_held == self._most:
                raise
            self._num_held += 1
            # Without the interrupted frames, which would be kept alive.
            self.error = self.error or error.with_traceback(None)
            if self._heard is not None:
                self._heard(error)
