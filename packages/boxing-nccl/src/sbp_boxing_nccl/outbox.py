"""Messages that are on their way: kept alive, and kept moving, by one thread.

MPI moves a large message only while its sender calls MPI; a sender that computes would hold up the
receiver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sbp_boxing_nccl.group import Group, Work
from sbp_core.boxing.call import Call

#: Pauses between two looks at the messages, in seconds: the first, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message that was sent but perhaps not received."""

    call: Call
    receiver: int
    group: Group
    work: Work


class Outbox:
    """The messages of one process.

    Args:
        fail: Called with a `BoxingError` when a message was not received within its deadline.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._messages: list[Message] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def keep(self, message: Message) -> None:
        """Keep a message that was just sent."""
        with self._changed:
            self._messages.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="sbp-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()

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
        pause = _FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._closed)
                if self._closed:
                    return
                messages = list(self._messages)
            try:
                received = [message for message in messages if message.work.request.Test()]
            except RuntimeError as error:  # MPI itself has failed
                self._fail(messages[0].call.failed(f"MPI reported: {error}"))
                return
            self._forget(received)
            late = [m for m in messages if m not in received and m.call.is_over]
            if late:
                self._fail(late[0].call.missing([late[0].receiver]))
                return
            pause = _FIRST_PAUSE_S if received else min(2 * pause, _LONGEST_PAUSE_S)
            time.sleep(pause)

    def _forget(self, received: list[Message]) -> None:
        if received:
            with self._changed:
                self._messages = [m for m in self._messages if m not in received]
                self._changed.notify_all()
