"""Messages between two ranks over NCCL, matched by tags, which NCCL itself does not have.

Each direction of each pair of ranks has a separate channel, connected when it is first needed. By
entries of the control store, sender and receiver agree on the next message, so both start it at the
same time:

    sender                                   receiver
    post: queue -> a thread                  collect:
      connect                                  connect
      offer n: tag and size of message n       look through the offers for the tag
      wait for a go                            go k: message n, the k-th to be moved
      send n, on the channel's stream          receive n, on the channel's stream

The receiver chooses the order in which the messages of a channel are moved, whatever the order of
sending. No kernel is started that would wait on the GPU for a rank that is not ready: such a kernel
occupies the GPU, and hinders NCCL when it connects ranks. Each channel has one sender and one
receiver, and moves one message at a time. So two ranks that both send first, or a ring of ranks, do
not deadlock, as they could with one channel for all messages.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from sbp_boxing_nccl.nccl.deadlines import Deadlines
from sbp_boxing_nccl.nccl.device import NcclChannel, NcclDevice, StreamEvent
from sbp_boxing_nccl.nccl.nccl_group import NcclWork
from sbp_core.boxing import CollectiveCall
from sbp_core.errors import BoxingError
from sbp_core.processes import ControlStore, wait_until

#: Pauses between two polls for entries, in seconds: the first, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 2e-3

#: Index of sender and receiver in the communicator of a pair.
_SENDER, _RECEIVER = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MailRoom:
    """The parts of a rank's connections that messages need.

    Args:
        store, device: Control store and GPU of this rank.
        deadlines: Watches the calls of NCCL, and sent messages until they are received.
        check_here: Raises `BoxingError` once the connections of this rank are broken.
        check: Raises it also when waiting for other ranks has become hopeless.
        connect: Connects (sender, receiver), both of which call this at some time.
        gather: Waits until senders are ready to connect; its error names the missing ones.
        fail: Breaks all connections.
    """

    store: ControlStore
    device: NcclDevice
    deadlines: Deadlines
    check_here: Callable[[CollectiveCall], None]
    check: Callable[[CollectiveCall], None]
    connect: Callable[[CollectiveCall, int, int], NcclChannel]
    gather: Callable[[CollectiveCall, Mapping[str, tuple[int, ...]]], None]
    fail: Callable[[BaseException], None]


def _look(done: Callable[[], bool], call: CollectiveCall) -> bool:
    """Poll until `done()` is true or the time of a call is over; return the last result."""
    first_s, longest_s = _FIRST_PAUSE_S, _LONGEST_PAUSE_S
    return wait_until(done, call.left_s, first_pause_s=first_s, longest_pause_s=longest_s)


def pair_name(sender: int, receiver: int) -> str:
    """Return the name of the channel from a sender to a receiver."""
    return f"mail-{sender}-{receiver}"


@dataclass(slots=True, kw_only=True, eq=False)
class NcclMessage:
    """One message that this rank has posted, for a receiver that may not have asked for it yet.

    Args:
        call: The call that posted it.
        values: Shape (elements,), contiguous, on the device; nothing else writes to them. None once
            the message is on the stream.
        ready: Event when the values have been computed.
        event: Event when the receiver has the message; None until it is on the stream, after the
            receiver has asked for it.
    """

    call: CollectiveCall
    values: torch.Tensor | None
    ready: StreamEvent
    event: StreamEvent | None = None

    @property
    def is_over(self) -> bool:
        """Whether the receiver has the message."""
        return self.event is not None and self.event.is_done()


class SendQueue:
    """The messages of this rank to another rank; a thread sends them when the receiver asks.

    Args:
        receiver: The other rank.
        room: The `MailRoom` of this rank.
    """

    def __init__(self, receiver: int, room: MailRoom) -> None:
        self._receiver, self._room = receiver, room
        self._name = pair_name(room.store.rank, receiver)
        self._posted: queue.SimpleQueue[NcclMessage | None] = queue.SimpleQueue()
        self._offered: dict[int, NcclMessage] = {}
        self._num_posted = self._num_offered = self._num_sent = 0
        #: Latest deadline of all messages, on the clock of `time.monotonic`.
        self.end_s = 0.0
        # A daemon: it may be inside NCCL when the process ends.
        self._thread = threading.Thread(target=self._run, name=f"sbp-{self._name}", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether all messages are on the stream."""
        return self._num_posted == self._num_sent

    def post(self, message: NcclMessage) -> None:
        """Send a message once the receiver asks for it; returns at once."""
        self._num_posted += 1
        self.end_s = max(self.end_s, message.call.end_s)
        self._posted.put(message)

    def close(self) -> None:
        """Send no more."""
        self._posted.put(None)

    def wait(self, limit_s: float) -> None:
        """Wait until the thread has ended, or abandon it inside NCCL; call `close` before."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        # Connected with the first message, whose call limits the time. The receiver connects when
        # it first collects from this rank, maybe much later: hence in a thread, and not in `post`.
        message = first = self._posted.get()
        if first is None:
            return
        try:
            self._room.device.use()
            channel = self._room.connect(first.call, self._room.store.rank, self._receiver)
            while message is not None:
                self._offer(message)
                while self._offered and self._posted.empty():
                    self._await_go(channel)
                message = self._posted.get()
        # No caller waits for this thread, so an error must break everything to be seen.
        except BoxingError as error:
            self._room.fail(error)
        except RuntimeError as error:
            self._room.fail(first.call.failed(f"NCCL reported: {error}"))

    def _offer(self, message: NcclMessage) -> None:
        assert message.values is not None, "it was not sent yet"
        offer = json.dumps([message.call.tag, message.values.nbytes])
        self._offered[self._num_offered] = message
        self._room.store.publish(f"{self._name}/offer/{self._num_offered}", offer, [self._receiver])
        self._num_offered += 1

    def _await_go(self, channel: NcclChannel) -> None:
        """Wait for the receiver's next go, or until a message is posted; send what it asks for."""
        go: str | None = None
        # The receiver may ask for any of them, so the earliest deadline limits the wait.
        most_urgent = min((m.call for m in self._offered.values()), key=lambda call: call.end_s)

        def over() -> bool:
            nonlocal go
            go = self._room.store.take(f"{self._name}/go/{self._num_sent}")
            self._room.check_here(most_urgent)
            # A newly posted message must be offered: the receiver may wait for it.
            return go is not None or not self._posted.empty()

        in_time = _look(over, most_urgent)
        if go is None:
            if not in_time:
                raise most_urgent.missing([self._receiver])
            return
        message = self._offered.pop(int(go))
        values, message.values = message.values, None
        assert values is not None, "it was not sent yet"
        with self._room.deadlines.launching(message.call, lambda: [self._receiver]) as entry:
            # The values may still be computed on another stream.
            channel.wait_for(message.ready)
            channel.send(values.data_ptr(), values.nbytes, "uint8", _RECEIVER)
            entry.work = NcclWork(event=channel.record(), channel=channel, tensors=(values,))
        message.event = entry.work.event
        self._num_sent += 1


@dataclass(slots=True, kw_only=True)
class _Sender:
    """The offers of one sender to this rank, and the go entries that answered them.

    Args:
        channel: The channel from the sender to this rank.
        num_offers: Number of offers seen.
        num_goes: Number of go entries written.
        offers: Number and bytes of the messages that were not asked for yet, by tag.
    """

    channel: NcclChannel
    num_offers: int = 0
    num_goes: int = 0
    offers: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)


class Inbox:
    """The messages of other ranks to this rank.

    Args:
        room: The `MailRoom` of this rank.
    """

    def __init__(self, room: MailRoom) -> None:
        self._room, self._rank = room, room.store.rank
        self._senders: dict[int, _Sender] = {}

    def collect(
        self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]
    ) -> dict[int, NcclWork]:
        """Start to fill each tensor with the message of its sender for the call's tag.

        Waits until all senders have offered it; not until it has arrived.

        Raises:
            BoxingError: a sender did not send in time; the message names it.
        """
        # Wait for all senders together, then connect them one after the other: connecting blocks
        # the thread inside NCCL until the other rank connects, too.
        new = [sender for sender in arriving if sender not in self._senders]
        self._room.gather(call, {pair_name(s, self._rank): (s, self._rank) for s in new})
        for sender in new:
            channel = self._room.connect(call, sender, self._rank)
            self._senders[sender] = _Sender(channel=channel)
        wanted, works = dict(arriving), dict[int, NcclWork]()

        def over() -> bool:
            self._room.check(call)
            # Start the offered messages at once; poll for the other messages until the deadline.
            offered = [sender for sender in wanted if self._has(sender, call.tag)]
            works.update(self._start(call, {sender: wanted.pop(sender) for sender in offered}))
            return not wanted

        if not _look(over, call):
            raise call.missing(sorted(wanted))
        return works

    def _has(self, sender: int, tag: str) -> bool:
        """Return whether a sender has offered a message for a tag."""
        source, name = self._senders[sender], pair_name(sender, self._rank)
        # Offers are numbered, and read once, in order; offers for other tags are kept for later
        # calls.
        while tag not in source.offers:
            offer = self._room.store.take(f"{name}/offer/{source.num_offers}")
            if offer is None:
                return False
            offered, num_bytes = json.loads(offer)
            source.offers.setdefault(offered, deque()).append((source.num_offers, num_bytes))
            source.num_offers += 1
        return True

    def _start(
        self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]
    ) -> dict[int, NcclWork]:
        """Receive the offered messages of some senders for the call's tag, as one NCCL group."""
        if not arriving:
            return {}
        for sender, values in arriving.items():
            source = self._senders[sender]
            number, num_bytes = source.offers[call.tag].popleft()
            if not source.offers[call.tag]:
                del source.offers[call.tag]
            if num_bytes != values.nbytes:
                raise call.failed(
                    f"rank {sender} sends {num_bytes} bytes, and {values.nbytes} are awaited"
                )
            # Before calling NCCL, which may block until the sender calls it, too.
            key = f"{pair_name(sender, self._rank)}/go/{source.num_goes}"
            self._room.store.publish(key, str(number), [sender])
            source.num_goes += 1
        channels = {sender: self._senders[sender].channel for sender in arriving}
        with self._room.deadlines.launching(call, lambda: list(arriving)):
            # The tensors may still be in use on torch's stream. Grouped, so that NCCL starts all
            # receives together: otherwise the first could wait for a sender that waits for the
            # second.
            ready = self._room.device.record()
            with self._room.device.grouped():
                for sender, values in arriving.items():
                    channels[sender].wait_for(ready)
                    channels[sender].receive(values.data_ptr(), values.nbytes, "uint8", _SENDER)
        return {
            sender: NcclWork(event=channel.record(), channel=channel, tensors=(arriving[sender],))
            for sender, channel in channels.items()
        }
