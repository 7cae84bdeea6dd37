"""Connect one rank to the other ranks over torch.distributed, keep messages, tell of failures.

Groups of ranks are connected when a step first needs them. A failed call breaks all connections of
this process (`sbp_core.processes.connections`). By closed connections and an entry in the control
store, it also breaks the calls of other ranks that wait for it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from sbp_boxing_torch._torch_compat import prefixed
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.group import TorchGroup, connect
from sbp_boxing_torch.rendezvous import COUNTER, TorchWorld
from sbp_core.boxing import CollectiveCall
from sbp_core.errors import BoxingError
from sbp_core.processes import (
    CLOSE_TIMEOUT_S,
    Connections,
    CountingStore,
    KeyValueControlStore,
    Outbox,
    count_opening,
    group_name,
    run_abandonable,
)

#: Seconds between two checks whether the ranks that are being connected still run.
_LOOK_S = 0.1

#: Seconds to wait for the end of the outbox thread.
_END_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class TorchMessage:
    """One message that was sent but may not have been received yet.

    Args:
        call: The call that has sent it.
        receiver: The receiving rank.
        group: The group that carries it.
        work: The torch work to wait for; None once it is received.
        values: Its bytes, kept alive until it is received; None afterwards.
    """

    call: CollectiveCall
    receiver: int
    group: TorchGroup
    work: dist.Work | None
    values: torch.Tensor | None
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, limit_s: float) -> bool:
        """Wait until it is received; return False if it is not within `limit_s` seconds.

        Raises:
            RuntimeError: the connection broke.
        """
        end = time.monotonic() + limit_s
        # gloo wakes only one thread when a message is received; a second would wait for ever.
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


class TorchOutbox(Outbox[TorchMessage]):
    """The messages that this process has sent.

    Args:
        connections: The connections, which break if a message is not received by its deadline.
    """

    def __init__(self, connections: TorchConnections) -> None:
        super().__init__()
        self._connections = connections

    def _watch(self) -> None:
        while (message := self._await_first()) is not None:
            call = message.call
            try:
                if not message.wait(call.left_s):
                    self._connections.fail(call.missing([message.receiver]))
            except RuntimeError as error:
                self._connections.connection_lost(call, f"to rank {message.receiver}: {error}")
            self._forget([message])


class TorchConnections(Connections):
    """The connections of one rank to all other ranks.

    Args:
        config: Transport, and time limit to connect.
        world: Rank, size and store of this process.

    Raises:
        BoxingError: the ranks could not be connected.
    """

    def __init__(self, config: TorchBoxingConfig, world: TorchWorld) -> None:
        opened = count_opening(world.store, COUNTER, world.rank)
        # A prefix of the store that no earlier backend of these processes has used. Dropped at the
        # end, which closes the store if nothing else holds it.
        store = prefixed(f"{COUNTER}/{opened}", world.store)
        super().__init__(KeyValueControlStore(store, world.rank, world.size))
        limit_s = config.connect_timeout_s
        self._config = config
        self._rank, self._host = world.rank, world.host
        self._store: CountingStore | None = store
        self._groups: dict[tuple[int, ...], TorchGroup] = {}
        #: Unfinished work that nobody has waited for, with its group, by `id`.
        self.begun: dict[int, tuple[TorchGroup, list[dist.Work]]] = {}
        self._outbox = TorchOutbox(self)
        self._messages: tuple[TorchGroup, ...] = ()
        self.rendezvous(limit_s)
        if world.size > 1:
            # NCCL runs the messages of a group one after the other. So two ranks that first send
            # and then receive would deadlock: each direction has a separate group.
            names = ("up", "down") if config.chosen_transport == "nccl" else ("all",)
            try:
                self._messages = tuple(
                    self._connect(f"messages-{name}", tuple(range(world.size)), limit_s)
                    for name in names
                )
            except BoxingError as error:
                self.fail(error)
                self.close()
                raise

    def group(self, call: CollectiveCall, ranks: tuple[int, ...]) -> TorchGroup:
        """Return the group of some ranks; the first call connects it, with the other ranks.

        Raises:
            BoxingError: a rank did not take part in time, or has failed.
        """
        if ranks in self._groups:
            return self._groups[ranks]
        name = group_name(ranks)
        self.wait_for_group(call, name, ranks)
        try:
            group = self._connect(name, ranks, call.left_s)
        except BoxingError as error:
            raise self.call_failed(call, call.failed(error.what, involved=ranks)) from error
        with self._lock:
            self._groups[ranks] = group
            too_late = self._failure is not None
        if too_late:  # all groups were broken before this one existed
            group.abort()
            self.check_usable(call)
        return group

    def messages(self, sender: int, receiver: int) -> TorchGroup:
        """Return the group, of all ranks in order, that carries messages between two of them."""
        return self._messages[0 if sender < receiver else -1]

    def post(
        self, call: CollectiveCall, receiver: int, values: torch.Tensor, tag: int
    ) -> TorchMessage:
        """Send a message, and keep it alive until it is received.

        Args:
            call: The call that sends it.
            receiver: The receiving rank.
            tag: Tag of the message.
            values: uint8, shape (bytes,), contiguous; not used by anything else.
        """
        group = self.messages(call.rank, receiver)
        with self.guard(call):
            work = group.send(values, receiver, tag)
        message = TorchMessage(call=call, receiver=receiver, group=group, work=work, values=values)
        self._outbox.keep(message)
        return message

    def await_message(self, message: TorchMessage) -> None:
        """Wait until a message is received.

        Raises:
            BoxingError: it was not received in time, or a rank has failed.
        """
        call = message.call
        with self.guard(call):
            received = message.wait(call.left_s)
        if not received:
            raise self.call_failed(call, call.missing([message.receiver]))

    def _announce(self, text: str) -> None:
        """See `Connections._announce`."""
        with self._lock:
            groups = (*self._groups.values(), *self._messages)
        self.control_store.announce_failure(text)
        for group in groups:
            group.abort()

    def _release(self) -> None:
        """See `Connections._release`; waits a while for messages, and for late ranks."""
        if self._failure is None:
            self._outbox.flush(CLOSE_TIMEOUT_S)
        self.control_store.deregister()
        if self._failure is None:
            self._await_others()
        # A thread that returns from the transport during interpreter shutdown would kill the
        # process by SIGABRT. So wait a moment until the last messages are received or lost.
        self._outbox.close(_END_S)
        # A group that is destroyed waits for its unfinished work, however long.
        for group, under_way in self.begun.values():
            if not all(work.is_completed() for work in under_way):
                group.abort()
        self.begun.clear()
        self._groups.clear()
        self._messages = ()
        self._store = None

    def _connect(self, name: str, ranks: tuple[int, ...], limit_s: float) -> TorchGroup:
        transport, rank = self._config.chosen_transport, self._rank
        if self._store is None:
            raise BoxingError("the boxing backend was closed", where=f"rank {rank}")
        store = prefixed(f"connect/{name}", self._store)

        def check_hope() -> None:
            if (reason := self.failure_reason()) is not None:
                raise BoxingError(reason)

        try:
            if transport == "nccl":  # connects on first use
                return connect(transport, ranks, rank, store, limit_s)
            # gloo itself waits until its timeout, even if other ranks have died.
            return run_abandonable(
                lambda: connect(transport, ranks, rank, store, limit_s, self._host),
                thread_name="sbp-connect",
                check=check_hope,
                look_s=_LOOK_S,
            )
        except RuntimeError as error:
            raise BoxingError(
                f"ranks {list(ranks)} were not connected within {limit_s:.3g} s: {error}",
                where=f"rank {rank}",
                todo="check that every process runs and that their hosts reach each other; "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME chooses the network",
            ) from error
