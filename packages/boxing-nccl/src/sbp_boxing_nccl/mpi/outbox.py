"""Messages that are on their way: kept alive, and kept moving, by one thread.

MPI moves a large message only while its sender calls MPI; a sender that computes would hold up the
receiver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sbp_boxing_nccl.mpi.group import SPIN_S, MpiGroup, MpiWork, pause_after
from sbp_core.boxing import CollectiveCall

#: Looks at a message that was just sent, and at one that moves before the next has its turn.
_EAGER_LOOKS, _LOOKS = 4, 32

#: Seconds that a first message waits for the sender to move it by itself.
_FIRST_PAUSE_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiMessage:
    """One message that was sent but perhaps not received."""

    call: CollectiveCall
    receiver: int
    group: MpiGroup
    work: MpiWork


class MpiOutbox:
    """The messages that this process has sent, until they are received.

    Args:
        fail: Called with a `BoxingError` when a message was not received within its deadline.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._messages: list[MpiMessage] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def keep(self, message: MpiMessage) -> None:
        """Keep a message that was just sent."""
        if message.work.look(_EAGER_LOOKS):
            return  # it is received
        with self._changed:
            self._messages.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="sbp-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, message: MpiMessage, limit_s: float) -> bool:
        """Wait until a message is received; False if it is not within `limit_s` seconds."""
        if message.work.is_over:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: message.work.is_over, limit_s)

    def flush(self, limit_s: float) -> bool:
        """Wait until all messages are received, for at most `limit_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._messages, limit_s)

    def close(self) -> None:
        """Stop watching; messages that were not received are abandoned."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for message in self._messages:
            message.group.abandon(message.work)

    def _watch(self) -> None:
        moved, moved_s = -1, 0.0
        while True:
            with self._changed:
                waits = not self._messages
                self._changed.wait_for(lambda: self._messages or self._closed)
                if self._closed:
                    return
            if waits:
                # A sender that now waits for something itself moves its messages meanwhile.
                time.sleep(_FIRST_PAUSE_S)
                moved = -1
            messages = list(self._messages)
            idle_s = time.monotonic() - moved_s if moved >= 0 else 0.0
            try:
                for message in messages:
                    message.work.look(_LOOKS if idle_s < SPIN_S else 1)
            except RuntimeError as error:  # MPI itself has failed
                self._fail(messages[0].call.failed(f"MPI reported: {error}"))
                return
            num_done, now = sum(message.work.num_done for message in messages), time.monotonic()
            if num_done != moved:
                moved, moved_s = num_done, now
            self._forget([message for message in messages if message.work.is_over])
            late = [m for m in messages if not m.work.is_over and m.call.is_over]
            if late:
                self._fail(late[0].call.missing([late[0].receiver]))
                return
            pause_s = pause_after(now - moved_s)
            if pause_s:
                time.sleep(pause_s)

    def _forget(self, received: list[MpiMessage]) -> None:
        if received:
            with self._changed:
                self._messages = [m for m in self._messages if m not in received]
                self._changed.notify_all()
