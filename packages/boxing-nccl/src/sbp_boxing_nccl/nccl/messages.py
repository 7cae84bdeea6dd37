"""Messages between two ranks, found by their tags, over NCCL, which has none.

Each direction of each pair of ranks has a channel of its own, connected when it is first needed.
Entries of the control store say what there is, and what is wanted, so that both ends start the same
message at the same time:

    sender                                   receiver
    post: queue -> a thread                  collect:
      connect                                  connect
      offer n: tag and size of message n       look through the offers for the tag
      wait for a go                            go k: message n, the k-th to be moved
      send n, on the channel's stream          receive n, on the channel's stream

The receiver chooses the order in which the messages of a channel are moved, whatever the order of
sending. Nothing is started on a GPU that would have to wait there for a rank which is elsewhere:
such a kernel occupies the GPU, and hinders NCCL where it connects ranks. And as each channel has
only one sender and one receiver, two ranks that send to each other first, or a ring of ranks, do
not wait for each other, as they could on one channel for all, which moves one message at a time.
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

#: Pauses between two looks for entries, in seconds: the first, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 2e-3

#: Place of each end in the communicator of a pair.
_SENDER, _RECEIVER = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MailRoom:
    """What messages of one rank need of its connections.

    Args:
        store, device: Of this rank.
        deadlines: Watches the calls of NCCL, and what was sent until it is received.
        check_here: Raises `BoxingError` once everything is broken.
        check: Raises it when waiting for others has become hopeless, too.
        connect: Connects (sender, receiver), both of which call this at some time.
        gather: Waits until senders are ready to connect, and names those that are not.
        fail: Breaks everything.
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
    """Look for entries until `done()` says yes or the time of a call is over; return the answer."""
    first_s, longest_s = _FIRST_PAUSE_S, _LONGEST_PAUSE_S
    return wait_until(done, call.left_s, first_pause_s=first_s, longest_pause_s=longest_s)


def pair_name(sender: int, receiver: int) -> str:
    """Return how both ends call the channel of one direction."""
    return f"mail-{sender}-{receiver}"


@dataclass(slots=True, kw_only=True, eq=False)
class NcclMessage:
    """One message that this rank has posted, for a receiver that may not have asked for it yet.

    Args:
        call: That posted it.
        values: Shape (elements,), contiguous, on the device; nobody else writes to them. None once
            it is on the stream.
        ready: When the values are there.
        event: When the receiver has it; None until it is on the stream, which the receiver has
            asked for by then.
    """

    call: CollectiveCall
    values: torch.Tensor | None
    ready: StreamEvent
    event: StreamEvent | None = None

    @property
    def is_over(self) -> bool:
        """Whether the receiver has it."""
        return self.event is not None and self.event.is_done()


class SendQueue:
    """The messages of this rank to one other, sent by one thread as the receiver asks for them.

    Args:
        receiver: The other rank.
        room: Of this rank.
    """

    def __init__(self, receiver: int, room: MailRoom) -> None:
        self._receiver, self._room = receiver, room
        self._name = pair_name(room.store.rank, receiver)
        self._posted: queue.SimpleQueue[NcclMessage | None] = queue.SimpleQueue()
        self._offered: dict[int, NcclMessage] = {}
        self._num_posted = self._num_offered = self._num_sent = 0
        #: When the time of all messages is over, on the clock of `time.monotonic`.
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
        """Wait until the thread has ended, or leave it behind inside NCCL; closed before."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        # Connected with the first message, whose call says how long that may take. The receiver
        # does so when it first collects from this rank, maybe much later: hence a thread, and not
        # the poster.
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
        """Look for the receiver's next go, for as long as nothing more is posted, and follow it."""
        go: str | None = None
        # The receiver may ask for any of them, so the wait is as long as the most urgent one
        # allows.
        most_urgent = min((m.call for m in self._offered.values()), key=lambda call: call.end_s)

        def over() -> bool:
            nonlocal go
            go = self._room.store.take(f"{self._name}/go/{self._num_sent}")
            self._room.check_here(most_urgent)
            # What is posted meanwhile must be offered: it may be what the receiver waits for.
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
    """What one sender has offered to this rank, and what of it was asked for.

    Args:
        channel: From it to this one.
        num_offers: That were seen.
        num_goes: That were given.
        offers: Number and bytes of the messages that were not asked for yet, by tag.
    """

    channel: NcclChannel
    num_offers: int = 0
    num_goes: int = 0
    offers: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)


class Inbox:
    """The messages of other ranks to this one.

    Args:
        room: Of this rank.
    """

    def __init__(self, room: MailRoom) -> None:
        self._room, self._rank = room, room.store.rank
        self._senders: dict[int, _Sender] = {}

    def collect(
        self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]
    ) -> dict[int, NcclWork]:
        """Start to fill each tensor with the message of its sender for the call's tag.

        Waits until all senders have offered it; not until it is here.

        Raises:
            BoxingError: a sender did not send in time; names it.
        """
        # All senders are waited for together, then connected one after the other: to connect keeps
        # the thread inside NCCL until the other end is there, too.
        new = [sender for sender in arriving if sender not in self._senders]
        self._room.gather(call, {pair_name(s, self._rank): (s, self._rank) for s in new})
        for sender in new:
            channel = self._room.connect(call, sender, self._rank)
            self._senders[sender] = _Sender(channel=channel)
        wanted, works = dict(arriving), dict[int, NcclWork]()

        def over() -> bool:
            self._room.check(call)
            # Those that are there are started at once; the others are looked for again, until the
            # deadline.
            offered = [sender for sender in wanted if self._has(sender, call.tag)]
            works.update(self._start(call, {sender: wanted.pop(sender) for sender in offered}))
            return not wanted

        if not _look(over, call):
            raise call.missing(sorted(wanted))
        return works

    def _has(self, sender: int, tag: str) -> bool:
        """Say whether a sender offers a message for a tag, as far as its offers have come."""
        source, name = self._senders[sender], pair_name(sender, self._rank)
        # Offers are numbered, and read once, in order; those for other tags are kept for later
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
        """Receive, as one, a message that each of some senders offers for the call's tag."""
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
            # Before we call NCCL, which may keep us until the sender does so too.
            key = f"{pair_name(sender, self._rank)}/go/{source.num_goes}"
            self._room.store.publish(key, str(number), [sender])
            source.num_goes += 1
        channels = {sender: self._senders[sender].channel for sender in arriving}
        with self._room.deadlines.launching(call, lambda: list(arriving)):
            # The tensors may still be in use on torch's stream; and grouped, so that NCCL starts
            # all receives as one: one after the other, the first could wait for a sender that waits
            # for the second.
            ready = self._room.device.record()
            with self._room.device.grouped():
                for sender, values in arriving.items():
                    channels[sender].wait_for(ready)
                    channels[sender].receive(values.data_ptr(), values.nbytes, "uint8", _SENDER)
        return {
            sender: NcclWork(event=channel.record(), channel=channel, tensors=(arriving[sender],))
            for sender, channel in channels.items()
        }
