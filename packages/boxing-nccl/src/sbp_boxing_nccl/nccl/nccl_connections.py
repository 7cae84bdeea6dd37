"""Connect one rank to the other ranks over NCCL, for collectives and messages; tell of failures.

Everything is connected when it is first needed. A failed call breaks all connections of this
process (`sbp_core.processes.connections`): all channels are aborted together, which unblocks their
waiting calls, and an entry in the control store makes the other ranks do the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import ClassVar

import torch

from sbp_boxing_nccl.configs import NcclBoxingConfig
from sbp_boxing_nccl.nccl.bootstrap import Bootstrap, check_devices, release
from sbp_boxing_nccl.nccl.deadlines import Deadlines, WatchedWork
from sbp_boxing_nccl.nccl.device import NcclChannel, NcclDevice
from sbp_boxing_nccl.nccl.messages import Inbox, MailRoom, NcclMessage, SendQueue, pair_name
from sbp_boxing_nccl.nccl.nccl_group import NcclGroup, NcclWork
from sbp_boxing_nccl.nccl.world import NcclWorld
from sbp_core.boxing import CollectiveCall
from sbp_core.errors import BoxingError
from sbp_core.processes import CLOSE_TIMEOUT_S, Connections, group_name, wait_until

_log = logging.getLogger(__name__)

#: Seconds to wait for the end of a thread that sends messages.
_QUEUE_END_S = 1.0

#: Pauses between two polls of work on the GPU, in seconds: the first, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-5, 5e-4

#: Seconds between two checks whether another rank has failed.
_CHECK_S = 0.02


class NcclConnections(Connections):
    """The connections of one rank to all other ranks.

    Args:
        config: Timeouts, and whether to run ahead.
        world: Rank, size and control store of this process.
        device: The GPU of this rank.

    Raises:
        BoxingError: a rank is missing, two ranks share a GPU, or their NCCLs differ.
    """

    transport_says: ClassVar[str] = "NCCL reported: "

    def __init__(self, config: NcclBoxingConfig, world: NcclWorld, device: NcclDevice) -> None:
        super().__init__(world.control_store)
        self.rank = world.rank
        self.device = device
        #: Whether calls return before their work is complete.
        self.runs_ahead = config.run_ahead
        self._config = config
        self._world = world
        self._groups: dict[tuple[int, ...], NcclGroup] = {}
        self._channels: dict[str, NcclChannel] = {}
        #: Unfinished work by `id`; its tensors have to be kept alive.
        self.begun: dict[int, WatchedWork] = {}
        self._send_queues: dict[int, SendQueue] = {}
        self._gave_up = False
        self._bootstrap = Bootstrap(self.control_store, device, self._check)
        self.deadlines = Deadlines(device.use, self._check_here, self._give_up)
        self._mail_room = MailRoom(
            store=self.control_store,
            device=device,
            deadlines=self.deadlines,
            check_here=self._check_here,
            check=self._check,
            connect=lambda call, *ranks: self._connect(call, pair_name(*ranks), ranks),
            gather=self._bootstrap.gather,
            fail=self._give_up,
        )
        self._inbox = Inbox(self._mail_room)
        try:
            self.rendezvous(config.connect_timeout_s)
            check_devices(self.control_store, device, config.connect_timeout_s)
        except BoxingError as error:
            self.fail(error)
            self.close()
            self.control_store.close()
            raise

    def group(self, call: CollectiveCall, ranks: tuple[int, ...]) -> NcclGroup:
        """Return the group of some ranks; the first call connects it, with the other ranks.

        Raises:
            BoxingError: a rank did not take part in time, or has failed.
        """
        if ranks not in self._groups:
            with self.guard(call):
                channel = self._connect(call, group_name(ranks), ranks)
            self._groups[ranks] = NcclGroup(ranks, self.rank, channel, self.device)
        return self._groups[ranks]

    def post(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> NcclMessage:
        """Send a message, and keep it alive until it is received.

        Args:
            call: The call that sends it.
            receiver: The receiving rank.
            values: Shape (elements,), contiguous, on the device; not used by anything else.
        """
        # A queue for each receiver, so that a slow receiver does not delay messages to other ranks.
        queue = self._send_queues.get(receiver)
        if queue is None:
            queue = self._send_queues[receiver] = SendQueue(receiver, self._mail_room)
        with self.guard(call):
            ready = self.device.record()
        message = NcclMessage(call=call, values=values, ready=ready)
        queue.post(message)
        return message

    def await_message(self, call: CollectiveCall, receiver: int, message: NcclMessage) -> None:
        """Wait until a message is received.

        Raises:
            BoxingError: it was not received in time, or a rank has failed.
        """

        def over() -> bool:
            self._check(call)
            return message.is_over

        with self.guard(call):
            if not wait_until(
                over, call.left_s, first_pause_s=_FIRST_PAUSE_S, longest_pause_s=_LONGEST_PAUSE_S
            ):
                raise call.missing([receiver])

    def collect(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> None:
        """Fill each tensor with the message of its sender for the call's tag.

        Raises:
            BoxingError: a message did not arrive in time, or a rank has failed.
        """
        with self.guard(call):
            for sender, work in self._inbox.collect(call, arriving).items():
                # When running ahead, the host continues, and the GPU waits in its stream. Then only
                # the thread of deadlines notices a missing message.
                if self.runs_ahead:
                    with self.deadlines.launching(call, [sender].copy) as entry:
                        entry.work = work
                    work.event.hold_back()
                elif not self._wait(call, work, call.left_s):
                    raise call.missing([sender])

    def is_over(self, call: CollectiveCall, entry: WatchedWork, limit_s: float) -> bool:
        """Wait for launched work; when running ahead, only torch's current stream waits.

        Returns:
            False if it is not complete after `limit_s` seconds.

        Raises:
            BoxingError: a rank has failed.
        """
        assert entry.work is not None, "it was launched"
        if entry.caller_waits:
            return self._wait(call, entry.work, limit_s)
        entry.work.event.hold_back()
        return True

    def _wait(self, call: CollectiveCall, work: NcclWork, limit_s: float) -> bool:
        """Wait for work; return False if it is not complete after `limit_s` seconds."""
        checked_s = time.monotonic()

        def over() -> bool:
            nonlocal checked_s
            if work.is_done():
                return True
            # Polling the GPU is cheap; asking the store for failed ranks is not.
            if time.monotonic() - checked_s > _CHECK_S:
                checked_s = time.monotonic()
                self._check(call)
            return False

        done = wait_until(
            over, limit_s, first_pause_s=_FIRST_PAUSE_S, longest_pause_s=_LONGEST_PAUSE_S
        )
        # Aborted work counts as done, too.
        self.check_usable(call)
        return done

    def _connect(self, call: CollectiveCall, name: str, ranks: tuple[int, ...]) -> NcclChannel:
        # Connected without the lock, because that may take long. If the connections broke
        # meanwhile, `_let_go` has not seen this channel, so it is aborted here.
        channel = self._bootstrap.connect(call, name, ranks)
        with self._lock:
            self._channels[name] = channel
            too_late = self._failure is not None or self._gave_up
        if too_late:
            self._let_go(abort=True)
            self._check_here(call)
        return channel

    def _check_here(self, call: CollectiveCall) -> None:
        """Raise `BoxingError` if this rank has failed.

        Closing does not count as a failure: messages may still be in flight.
        """
        if self._failure is not None:
            self.check_usable(call)

    def _check(self, call: CollectiveCall) -> None:
        """Raise `BoxingError` if waiting for other ranks has become hopeless."""
        self._check_here(call)
        reason = self.control_store.failure()
        if reason is not None:
            raise self.connection_lost(call, reason)

    def _give_up(self, error: BaseException) -> None:
        """Break all connections because of an error that no caller would get."""
        if self._closed and not self._gave_up:
            _log.warning("rank %d closes while operations are running: %s", self.rank, error)
        self._gave_up = True
        self.fail(error)

    def _announce(self, text: str) -> None:
        """See `Connections._announce`; announced before a call of NCCL may block."""
        self.control_store.announce_failure(text)
        self._let_go(abort=True)

    def _let_go(self, *, abort: bool) -> None:
        """Abort or destroy all channels, together and once."""
        with self._lock:
            channels, self._channels = self._channels, {}
        limit_s = self._config.abort_timeout_s
        if not release(channels, self.device, limit_s, abort=abort):
            _log.warning(
                "rank %d abandons %d communicators that NCCL did not release within %g s",
                self.rank,
                len(channels),
                limit_s,
            )

    def _release(self) -> None:
        """See `Connections._release`; waits a while for messages, and for late ranks."""
        # The order of leaving: finish own messages; announce it, and wait until all other ranks
        # have done the same, because a communicator must not be destroyed while a peer uses it;
        # then destroy. After any failure, abort: destroying would wait for missing peers.
        flushed = self._failure is None and self._flush()
        try:
            works = [entry.work for entry in self.begun.values()]
            flushed = flushed and all(work is None or work.is_done() for work in works)
        except RuntimeError:  # NCCL has detected a failure
            flushed = False
        self.control_store.deregister()
        well = flushed and self._await_others()
        for queue in self._send_queues.values():
            queue.close()
        self.deadlines.close()
        self._let_go(abort=not well)
        self.begun.clear()
        # Some threads may have been blocked inside NCCL, and are unblocked by now.
        for queue in self._send_queues.values():
            queue.wait(_QUEUE_END_S)
        if well:
            self.control_store.close()
            self._world.free()

    def _flush(self) -> bool:
        """Wait until all messages and all work are done; return whether they are."""
        queues = self._send_queues.values()

        def idle() -> bool:
            return all(queue.is_idle for queue in queues) and self.deadlines.is_idle

        def over() -> bool:
            return idle() or self._gave_up or self.failure_reason() is not None

        # A receiver may be much later; the deadline of a message is its sender's.
        end_s = max((queue.end_s for queue in queues), default=0.0)
        self.control_store.wait_for(over, max(CLOSE_TIMEOUT_S, end_s - time.monotonic()))
        if not idle():
            _log.warning("rank %d closes before its messages were received", self.rank)
        return idle() and not self._gave_up
