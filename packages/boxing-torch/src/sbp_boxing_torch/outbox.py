"""Messages that are on their way: kept alive until they are received, watched by one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sbp_boxing_torch.group import TorchGroup
from sbp_core.boxing.processes import CollectiveCall

#: Seconds that the thread gets to end.
_END_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMessage:
    """One message that was sent but perhaps not received.

    Args:
        values: Its bytes, which must not be freed before.
    """

    call: CollectiveCall
    receiver: int
    group: TorchGroup
    work: dist.Work
    values: torch.Tensor


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

    def keep(
        self,
        call: CollectiveCall,
        receiver: int,
        group: TorchGroup,
        work: dist.Work,
        values: torch.Tensor,
    ) -> None:
        """Keep a message that was just sent."""
        if self._thread is None:
            # A daemon: it may be inside a wait of the transport when the process ends.
            self._thread = threading.Thread(target=self._watch, name="sbp-outbox", daemon=True)
            self._thread.start()
        with self._changed:
            self._under_way += 1
        self._messages.put(
            TorchMessage(call=call, receiver=receiver, group=group, work=work, values=values)
        )

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
                received = message.group.wait_message(message.work, message.call.left_s)
            except RuntimeError as error:
                self._lost(message.call, f"to rank {message.receiver}: {error}")
            else:
                if not received:
                    self._fail(message.call.missing([message.receiver]))
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
