"""`Outbox`: keeps the messages that a process sends alive until they are received.

The process-to-process transports of boxing-torch and boxing-nccl subclass `Outbox`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")


class Outbox(ABC, Generic[MessageT]):
    """The messages that this process has sent, until they are received.

    A subclass implements the thread's `_watch`, which calls `_forget` for received messages and
    ends once the outbox is `_closed`.
    """

    def __init__(self) -> None:
        self._messages: list[MessageT] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def keep(self, message: MessageT) -> None:
        """Keep a message that was just sent."""
        with self._changed:
            self._messages.append(message)
            if self._thread is None:
                # A daemon: it may be inside a call of the transport when the process ends.
                self._thread = threading.Thread(target=self._watch, name="sbp-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Wait until all messages are received, for at most `limit_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._messages, limit_s)

    def close(self, limit_s: float | None = None) -> None:
        """End the thread, and wait for that: for so many seconds, or as long as it takes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _await_first(self) -> MessageT | None:
        """Return the message that was kept first; None once the outbox is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed)
            return self._messages[0] if self._messages else None

    def _forget(self, received: Collection[MessageT]) -> None:
        """Drop messages that were received, or are lost."""
        with self._changed:
            self._messages = [one for one in self._messages if one not in received]
            self._changed.notify_all()

    @abstractmethod
    def _watch(self) -> None:
        """Wait for the messages, on the thread."""
