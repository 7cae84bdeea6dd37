"""The connections of one process: groups of ranks, messages on their way, and how it all breaks.

Groups of ranks are connected when a step first needs them. A call that fails breaks everything
here (`sbp_core.boxing.connections`), and by closed connections and a note on the board whatever
waits for it on other ranks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from sbp_boxing_torch._torch_compat import prefixed
from sbp_boxing_torch.board import Board
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.group import Group, connect
from sbp_boxing_torch.outbox import Outbox
from sbp_boxing_torch.rendezvous import World
from sbp_core.boxing.call import Call, group_name
from sbp_core.boxing.connections import Connections
from sbp_core.errors import BoxingError

_log = logging.getLogger(__name__)

#: Seconds that a rank waits, when it closes, for the others not to need it any more.
_FAREWELL_S = 10.0

#: Seconds within which the rank that failed first tells why, after its connections broke.
_REASON_S = 1.0


class TorchConnections(Connections):
    """The connections of one rank to all others.

    Args:
        config: Transport, and time to connect.
        world: This process among all.

    Raises:
        BoxingError: the ranks could not be connected.
    """

    def __init__(self, config: TorchBoxingConfig, world: World) -> None:
        super().__init__()
        self._config = config
        self._world = world
        opened = world.store.add(f"sbp-boxing/opened/{world.rank}", 1)
        # A part of the store where no earlier backend of these processes has left notes.
        self._store = prefixed(f"sbp-boxing/{opened}", world.store)
        self.board = Board(self._store, world.rank)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._outbox = Outbox(self.fail)
        self._messages: tuple[Group, ...] = ()
        if world.size > 1:
            everyone, limit_s = tuple(range(world.size)), config.connect_timeout_s
            # NCCL runs the messages of a group one after the other, so that two ranks that first
            # send and then receive would wait for each other: each direction has a group.
            names = ("up", "down") if config.chosen_transport == "nccl" else ("all",)
            self._messages = tuple(
                self._connect(f"messages-{name}", everyone, limit_s) for name in names
            )

    def group(self, call: Call, ranks: tuple[int, ...]) -> Group:
        """Return the group of some ranks; the first call connects it, together with the others.

        Raises:
            BoxingError: a rank did not come in time, or has failed.
        """
        if ranks in self._groups:
            return self._groups[ranks]
        board, name = self.board, group_name(ranks)
        board.join(name)

        def over() -> bool:
            self.check_usable(call)
            return not board.not_joined(name, ranks) or board.failure() is not None

        came = board.wait_for(over, call.left_s)
        missing = board.not_joined(name, ranks)
        if missing:
            raise self.broken(call, self._told(call) if came else call.missing(missing))
        with self.guard(call):
            group = self._connect(name, ranks, call.left_s)
        with self._lock:
            self._groups[ranks] = group
        return group

    def messages(self, sender: int, receiver: int) -> Group:
        """Return the group, of all ranks in order, that carries messages between two of them."""
        return self._messages[0 if sender < receiver else -1]

    def post(self, call: Call, receiver: int, values: torch.Tensor, tag: int) -> None:
        """Send a message, and keep it alive until it is received.

        Args:
            call: The call that sends it.
            receiver: Rank that it goes to.
            tag: Its number.
            values: uint8, shape (bytes,), contiguous; not used by anybody else.
        """
        group = self.messages(call.rank, receiver)
        with self.guard(call):
            work = group.send(values, receiver, tag)
        self._outbox.keep(call, receiver, group, work, values)

    @contextlib.contextmanager
    def guard(self, call: Call) -> Iterator[None]:
        """Turn the errors of a transport into one that says which step failed, and why."""
        try:
            yield
        except BoxingError:
            raise
        except RuntimeError as error:
            raise self.broken(call, self._told(call, str(error))) from error

    def _announce(self, text: str) -> None:
        """See `Connections._announce`."""
        with self._lock:
            groups = (*self._groups.values(), *self._messages)
        self.board.announce(text)
        for group in groups:
            group.abort()

    def _release(self) -> None:
        """See `Connections._release`; waits a while for messages, and for ranks on their way."""
        if self._failure is None:
            self._outbox.flush(_FAREWELL_S)
        self.board.leave()
        if self._failure is None:
            self._part()
        self._outbox.close()
        self._groups.clear()
        self._messages = ()

    def _part(self) -> None:
        """Stay until no rank needs this one: its connections, or the store if it hosts it."""
        everyone = range(self._world.size)

        def over() -> bool:
            return self.board.all_left(everyone) or self.board.failure() is not None

        if not self.board.wait_for(over, _FAREWELL_S):
            _log.warning("rank %d leaves before other ranks did", self._world.rank)

    def _told(self, call: Call, transport: str = "") -> BoxingError:
        """Make the error for a broken connection: what the rank that failed first says about it."""
        if self._failure is None:
            self.board.wait_for(lambda: self.board.failure() is not None, _REASON_S)
        lost = f"a rank of the group has ended, or its connection is lost ({transport})"
        return call.failed(self.board.failure() or lost)

    def _connect(self, name: str, ranks: tuple[int, ...], limit_s: float) -> Group:
        store = prefixed(f"connect/{name}", self._store)
        transport = self._config.chosen_transport
        try:
            return connect(transport, ranks, self._world.rank, store, limit_s)
        except RuntimeError as error:
            raise BoxingError(
                f"ranks {list(ranks)} were not connected within {limit_s:g} s: {error}",
                where=f"rank {self._world.rank}",
                todo="check that every process runs and that their hosts reach each other; "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME chooses the network",
            ) from error
