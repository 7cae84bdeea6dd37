"""Handle Ctrl-C, SIGTERM and SIGHUP in `sbp-train`, depending on the phase of the run.

| phase | Ctrl-C | SIGTERM, SIGHUP, SIGUSR1 |
|---|---|---|
| training | stops it after the step; the second one at once | the same |
| saving the states | waits for them; the second one abandons them | wait for them |
| anything else | stops it at once | stop it at once |

Updates overwrite the states, so in the middle of a step there are no states to save; and if each
rank is a process, all have to stop after the same step. Slurm sends SIGUSR1 before it ends a job
(`sbatch --signal=USR1@60`); outside of Slurm jobs SIGUSR1 requests a status report (`status`).

A run that is stopped during training saves its states. Until this has begun, a further signal is
handled as in the phase of saving.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from types import FrameType
from typing import Any

from sbp_launch.run.status import status_signals

#: The last line before ranks connect, and the line before surviving ranks save after a failure.
#: The parent process reads them to decide how long to wait (`launching`).
STARTING = "starting the ranks"
SAVING = "a rank has failed: saving the states with the surviving ranks"

#: The signals that are handled; Windows lacks two of them.
_HEARD = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


class Terminated(SystemExit):
    """A signal asked the program to end; its exit code is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number
        self.name = signal.Signals(number).name

    def __str__(self) -> str:
        return self.name


class _At(Enum):
    ANYTHING = 0
    TRAINING = 1
    SAVING = 2


class StopSignals:
    """Handles signals inside its `with` block, if that is in the main thread.

    A signal that the program ignores, as under `nohup`, stays ignored. The former handlers are
    restored after the block.

    Args:
        name: Name of the command, as a prefix of messages to stderr.
    """

    def __init__(self, name: str = "sbp-train") -> None:
        self.name = name
        self.pending: BaseException | None = None
        self._at = _At.ANYTHING
        self._interrupts = 0  # Ctrl-C while the states are saved
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            heard = {getattr(signal, name) for name in _HEARD if hasattr(signal, name)}
            for number in sorted(heard.difference(status_signals())):
                before = signal.getsignal(number)
                # None: the handler was not set from Python, and could not be restored.
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let signals stop the block after a step; saving the states follows, whatever ends it."""
        self._at = _At.TRAINING
        try:
            yield
        finally:
            self._at = _At.SAVING

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let signals wait until the block has ended."""
        self._at = _At.SAVING
        try:
            yield
        finally:
            self._at, self._interrupts = _At.ANYTHING, 0

    @property
    def pending_number(self) -> int:
        """Number of the signal that waits for the end of the step, or 0."""
        if self.pending is None:
            return 0
        return self.pending.number if isinstance(self.pending, Terminated) else signal.SIGINT

    def stop_if_asked(self) -> None:
        """Stop now if a signal is pending.

        Raises:
            Terminated, KeyboardInterrupt: a signal is pending.
        """
        if self.pending is not None:
            pending, self.pending = self.pending, None
            raise pending

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_interrupt = number == signal.SIGINT
        stop = KeyboardInterrupt() if is_interrupt else Terminated(number)
        told = "Ctrl-C" if is_interrupt else str(stop)
        if self._at is _At.SAVING:
            self._interrupts += is_interrupt
            if self._interrupts > 1:
                raise stop
            self.pending = self.pending or stop
            self._say("saving the states ... (press Ctrl-C again to abandon them)")
        elif self._at is _At.TRAINING and self.pending is None:
            self.pending = stop
            self._say(f"{told}: stopping after this step (a second one stops at once)")
        else:
            if self._at is _At.TRAINING:
                self._at = _At.SAVING
            self._say(f"{told}: stopping")
            raise stop

    def _say(self, text: str) -> None:
        # Bypass Python's buffers: the signal may have interrupted a print.
        with suppress(OSError):  # the terminal may have been closed, which causes SIGHUP
            os.write(2, f"\n{self.name}: {text}\n".encode())
