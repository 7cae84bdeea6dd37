"""Messages that are on their way: kept alive until they are received, watched by one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from sbp_boxing_torch.group import TorchGroup
from sbp_core.boxing import CollectiveCall

#: Seconds that the thread gets to end.
_END_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class TorchMessage:
    """One message that was sent but perhaps not received.

    Args:
        call: That has sent it.
        receiver: Rank that it goes to.
        group: That it goes through.
        work: What to wait for; None once it is received.
        values: Its bytes, which must not be freed before; None after it.
    """

    call: CollectiveCall
    receiver: int
    group: TorchGroup
    work: dist.Work | None
    values: torch.Tensor | None
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, limit_s: float) -> bool:
        """Wait until it is received; False if it is not within `limit_s` seconds.

        Raises:
            RuntimeError: the connection broke.
        """
        end = time.monotonic() + limit_s
        # gloo tells only one thread that a message is received; the others would wait for ever.
        if not self._turn.acquire(timeout=limit_s):
            return False
        try:
            if self.work is not None:
                left_s = max(1e-3, end - time.monotonic())
                if not self.group.wait_message(self.work, left_s):
                    return False
                self.work = self.values = None
        finally:
            self._turn.release()
        return True


class TorchOutbox:
    """The messages that this process has sent, until they are received.

    Args:
        fail: Called with a `BoxingError` when a message was not received within its deadline.
        lost: Called with the call that sent a message, and what the transport says, when the
            connection to its receiver broke.
    """

    def __init__(
        self, fail: Callable[[BaseException], None], lost: Callable[[CollectiveCall, str], object]
    ) -> None:
        self._fail = fail
        self._lost = lost
        self._messages: queue.SimpleQueue[TorchMessage | None] = queue.SimpleQueue()
        self._under_way = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def keep(self, message: TorchMessage) -> None:
        """Keep a message that was just sent."""
        if self._thread is None:
            # A daemon: it may be inside a wait of the transport when the process ends.
            self._thread = threading.Thread(target=self._watch, name="sbp-outbox", daemon=True)
            self._thread.start()
        with self._changed:
            self._under_way += 1
        self._messages.put(message)

    def flush(self, limit_s: float) -> bool:
        """Wait until all messages are received, for at most `limit_s` seconds."""
        end = time.monotonic() + limit_s
        with self._changed:
            while self._under_way:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def close(self) -> None:
        """Stop watching once the messages at hand are received or lost.

        Waits a moment for that: a thread that comes back from the transport while the interpreter
        is taken down would end the process by SIGABRT.
        """
        self._messages.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _watch(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                received = message.wait(message.call.left_s)
            except RuntimeError as error:
                self._lost(message.call, f"to rank {message.receiver}: {error}")
            else:
                if not received:
                    self._fail(message.call.missing([message.receiver]))
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
