"""`ExchangeCommunicator`: runs collectives between processes; a backend adds its transport.

It determines which rank sends which pieces to which, checks shards, and packs and unpacks buffers.
The transport itself decides how long to wait, what the error of a missing rank says, and which of
its own collectives to use.

A message is a copy, so the owner may change its shard as soon as it is sent. A collective uses the
shard itself until its caller, or the caller's stream, has waited for it. Beginning a collective
packs and sends; unpacking and reducing follow at the end. A message is received directly into its
place in the result if this is one piece of memory. Messages that are added to it are received into
separate memory first. For a `receive` in two terms, each from two ranks:

    result      | term 0 of rank 0 | term 0 of rank 1 |     received here
    arriving    | term 1 of rank 2 |                        received here, added when all are here,
                | term 1 of rank 3 |                        in the order of the terms

So messages may arrive in any order, while the order of sums is fixed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

import torch

from sbp_core.boxing import (
    BoxingStep,
    CollectiveCall,
    Communicator,
    Delivered,
    Delivery,
    Manifest,
    Pending,
    StepKind,
    TrafficCounter,
    TransferPiece,
    bounds_of,
    manifest_of,
    span,
    transfer_pieces,
    volume,
)
from sbp_core.processes import Connections
from sbp_torch.boxing.execute import check_shard, detach_shard, fill, reduction_of, torch_dtype
from sbp_torch.boxing.processes.packed_buffer import PackedBuffers, num_elements, pack, unpack

ConnectionsT = TypeVar("ConnectionsT", bound=Connections)

#: Waits for a collective or receive that has begun, and returns the rank's part; raises the errors
#: that `ExchangeCommunicator` names.
Finish = Callable[[], torch.Tensor]

#: Waits for flat tensors that are being moved; raises the same errors.
Await = Callable[[], None]

#: Number of steps whose roles a communicator caches; a training step has fewer.
_REMEMBERED = 4096

_REDUCES = (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One rank's part in a collective, cached because computing it is slower than a small message.

    Args:
        step: The collective.
        ranks: The group of the rank.
        shape, dtype: Shape and dtype of the rank's shard.
        reduction: `sum`, `max` or `min` for an all-reduce or reduce-scatter; else "".
        known: The pieces that the rank sends and receives; None for an all-reduce.
    """

    step: BoxingStep
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduction: str
    known: Manifest | None

    @property
    def manifest(self) -> Manifest:
        """The pieces that the rank sends and receives, except in an all-reduce."""
        assert self.known is not None, "an all-reduce has no manifest"
        return self.known


def after(wait: Await, make: Finish) -> Finish:
    """Return a function that waits and then makes the result."""

    def finish() -> torch.Tensor:
        wait()
        return make()

    return finish


class ExchangePending(Pending):
    """A collective or receive of an `ExchangeCommunicator` that has begun.

    Args:
        connections: The connections of this process.
        call: The call that began it.
        finish: Waits for it and returns the result.
    """

    __slots__ = ("_call", "_connections", "_finish")

    def __init__(self, connections: Connections, call: CollectiveCall, finish: Finish) -> None:
        self._connections, self._call, self._finish = connections, call, finish

    def wait(self) -> torch.Tensor:
        """See `Pending.wait`."""
        call = self._call
        call.restart()
        self._connections.check_usable(call)
        with self._connections.pending(call):
            return self._finish()


class ExchangeDelivery(Delivery):
    """The messages of one call of `ExchangeCommunicator.send`.

    Args:
        connections: The connections of this process.
        call: The call that sent the messages.
        awaited: Functions that wait for one message each.
    """

    __slots__ = ("_awaited", "_call", "_connections")

    def __init__(
        self, connections: Connections, call: CollectiveCall, awaited: Sequence[Await]
    ) -> None:
        self._connections, self._call, self._awaited = connections, call, awaited

    def wait(self) -> None:
        """See `Delivery.wait`."""
        self._connections.check_usable(self._call)
        with self._connections.pending(self._call):
            for wait in self._awaited:
                wait()
        self._awaited = ()


class ExchangeCommunicator(Communicator, Generic[ConnectionsT]):
    """Executes boxing steps for one rank, over the connections of its process.

    `sent_bytes` counts the buffers that are sent, not the predictions of steps. This class counts a
    message when it is posted. The subclass counts a collective: it has a `TrafficCounter` for each
    group next to the calls of its library, and passes it to `_count`.

    A subclass implements the four methods that move flat tensors: shape (elements,), contiguous, of
    the step's dtype. Each returns a function that waits for the end. The methods and these
    functions raise `BoxingError` if the deadline of the call is over, or if another rank failed.

    Args:
        connections: The connections of this process.
        rank: The rank of this process.
        device: The device of results.
    """

    def __init__(self, connections: ConnectionsT, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.sent_bytes = 0
        self.device = str(device)
        self._connections = connections
        self._device = device
        self._roles: dict[int, Role] = {}

    def collective(
        self,
        step: BoxingStep,
        shard: torch.Tensor,
        *,
        tag: str,
        deadline_s: float,
        donate: bool = False,
    ) -> torch.Tensor:
        """See `Communicator.collective`."""
        call, finish = self._start(step, shard, tag, deadline_s, donate)
        with self._connections.pending(call):
            return finish()

    def begin(
        self,
        step: BoxingStep,
        shard: torch.Tensor,
        *,
        tag: str,
        deadline_s: float,
        donate: bool = False,
    ) -> Pending:
        """See `Communicator.begin`."""
        call, finish = self._start(step, shard, tag, deadline_s, donate)
        return ExchangePending(self._connections, call, finish)

    def _start(
        self, step: BoxingStep, shard: torch.Tensor, tag: str, deadline_s: float, donate: bool
    ) -> tuple[CollectiveCall, Finish]:
        """Begin a collective; return the call, and the function that waits for its result."""
        call = self._begin(step, tag, deadline_s)
        # By id, because hashing a step takes longer than a small message. A cached role keeps its
        # step alive, so no other step has the same id.
        role = self._roles.get(id(step)) or self._new_role(step, shard)
        if shard.shape != role.shape or shard.dtype != role.dtype:
            check_shard(step, self.rank, shard)
        shard = detach_shard(shard)
        if len(role.ranks) == 1:
            return call, lambda: shard
        with self._connections.pending(call):
            return call, self._collective(call, role.ranks, shard, donate)

    def send(
        self, step: BoxingStep, shard: torch.Tensor, *, tag: str, deadline_s: float
    ) -> Delivery:
        """See `Communicator.send`."""
        call = self._begin(step, tag, deadline_s)
        check_shard(step, self.rank, shard)
        shard = detach_shard(shard)
        outgoing: dict[int, list[TransferPiece]] = {}
        for piece in transfer_pieces(step):
            if piece.sender == self.rank != piece.receiver:
                outgoing.setdefault(piece.receiver, []).append(piece)
        awaited: list[Await] = []
        for receiver, pieces in outgoing.items():
            # A copy, because the caller may drop the shard, which may be a view of a larger tensor.
            values = pack(shard, pieces, copy=True).to(self._device)
            size_bytes = values.nbytes
            awaited.append(self._post(call, receiver, values))
            self.sent_bytes += size_bytes
        return ExchangeDelivery(self._connections, call, awaited) if awaited else Delivered()

    def receive(
        self, step: BoxingStep, shard: torch.Tensor | None, *, tag: str, deadline_s: float
    ) -> torch.Tensor:
        """See `Communicator.receive`."""
        call, finish = self._start_receive(step, shard, tag, deadline_s)
        with self._connections.pending(call):
            return finish()

    def begin_receive(
        self, step: BoxingStep, shard: torch.Tensor | None, *, tag: str, deadline_s: float
    ) -> Pending:
        """See `Communicator.begin_receive`."""
        call, finish = self._start_receive(step, shard, tag, deadline_s)
        return ExchangePending(self._connections, call, finish)

    def _start_receive(
        self, step: BoxingStep, shard: torch.Tensor | None, tag: str, deadline_s: float
    ) -> tuple[CollectiveCall, Finish]:
        """Request the messages of a transfer; return the call, and a function for its result."""
        call = self._begin(step, tag, deadline_s)
        mine = [piece for piece in transfer_pieces(step) if piece.receiver == self.rank]
        by_sender: dict[int, list[TransferPiece]] = {}
        for piece in mine:
            by_sender.setdefault(piece.sender, []).append(piece)
        own = by_sender.pop(self.rank, [])
        if own:
            if shard is None:
                raise call.failed("this rank is a sender too, and gave no shard to receive()")
            check_shard(step, self.rank, shard)
            shard = detach_shard(shard)
        if len(own) == len(mine) == 1 and shard is not None:
            # The result is a slice of the rank's own shard, often without a copy.
            part = shard[own[0].source_slices]
            if part.shape == self._shape_after(step):
                return call, part.contiguous
        # Zero where the first term has no piece, which happens if the target is P(sum).
        shape, dtype = self._shape_after(step), torch_dtype(step.dtype)
        first = sum(volume(piece.target) for piece in mine if piece.term == mine[0].term)
        make = torch.empty if first == prod(shape) else torch.zeros
        result = make(shape, dtype=dtype, device=self._device)
        arriving: dict[int, torch.Tensor] = {}
        landed: set[int] = set()  # the senders whose message is received into the result
        for sender, pieces in by_sender.items():
            # A message that is one piece of the first term is received directly into the result, if
            # its place is one piece of memory: no sum comes before it. All other messages are
            # received into separate memory, and then placed or added in the order of the terms.
            where = span(shape, pieces[0].target)
            if len(pieces) == 1 and pieces[0].term == mine[0].term and where is not None:
                arriving[sender] = result.view(-1)[slice(*where)]
                landed.add(sender)
            else:
                elements = num_elements(step, pieces)
                arriving[sender] = torch.empty(elements, dtype=dtype, device=self._device)
        with self._connections.pending(call):
            await_messages = self._collect(call, arriving)

        def finish() -> torch.Tensor:
            await_messages()
            if own:
                assert shard is not None, "checked above"
                arriving[self.rank] = pack(shard, own)
            received = [
                (piece, None if piece.sender in landed else part)
                for piece, part in unpack(mine, arriving)
            ]
            if received:
                reduces = mine[0].term != mine[-1].term
                fill(result, received, reduction_of(step) if reduces else None)
            return result

        return call, finish

    @abstractmethod
    def _collective(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> Finish:
        """Begin a collective among the ranks of a group: two or more, in mesh order.

        Args:
            call: A call with a step of any kind except `TRANSFER` and `LOCAL`.
            ranks: The group.
            shard: This rank's part under the step's source, checked and detached.
            donate: Whether the shard's memory may be overwritten, and may become the result. It may
                differ between ranks, so the communication must not depend on it.

        Returns:
            A function that waits for this rank's part under the step's target, and returns it. The
            functions of several collectives may be called in any order.
        """

    @abstractmethod
    def _post(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> Await:
        """Send a message without waiting for the receiver.

        Args:
            call: The call that sends it.
            receiver: The rank that receives it.
            values: A tensor on the communicator's device, which nobody else uses.

        Returns:
            A function that waits until the receiver has the message, and then drops the values.
        """

    @abstractmethod
    def _collect(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> Await:
        """Begin to fill each tensor with the message of its sender for the call's tag."""

    @abstractmethod
    def _exchange_buffers(
        self, call: CollectiveCall, ranks: tuple[int, ...], buffers: PackedBuffers
    ) -> Await:
        """Begin to send each rank its chunk of `buffers.sent`, and to fill `buffers.received`.

        May call `buffers.keep_own` while data is in transit.

        Args:
            call: The call that exchanges them.
            ranks: The group.
            buffers: The chunks, in the order of `ranks`. The rank's own chunk is often, but not
                always, left out.
        """

    def _count(self, traffic: TrafficCounter) -> None:
        """Count the bytes that a collective sends to other ranks, after the call of its library."""
        sent_bytes = traffic.take()
        # There is no call between reading and writing, because at a call Python may switch threads,
        # and the count of the other thread would be lost.
        self.sent_bytes += sent_bytes

    def _begin(self, step: BoxingStep, tag: str, deadline_s: float) -> CollectiveCall:
        """Return a new call for a step, after a check that the connections can be used."""
        connections = self._connections
        call = CollectiveCall.begin(step, tag, self.rank, deadline_s, connections.describe_ranks)
        connections.check_usable(call)
        return call

    def _role(self, call: CollectiveCall) -> Role:
        """Return the role of this rank in a collective that has begun."""
        return self._roles[id(call.step)]

    def _new_role(self, step: BoxingStep, shard: torch.Tensor) -> Role:
        """Compute the role of this rank in a collective, and check its shard."""
        check_shard(step, self.rank, shard)
        ranks = step.group(self.rank)
        role = Role(
            step=step,
            ranks=ranks,
            shape=tuple(shard.shape),
            dtype=shard.dtype,
            reduction=reduction_of(step) if step.kind in _REDUCES else "",
            known=None if step.kind is StepKind.ALL_REDUCE else manifest_of(step, self.rank),
        )
        # The role keeps its step alive (see `_start`), so roles and steps are dropped together.
        if len(self._roles) >= _REMEMBERED:
            self._roles.clear()  # programs that keep making new steps must not fill memory
        self._roles[id(step)] = role
        return role

    def _exchange(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor
    ) -> Finish:
        """Begin a collective by sending each rank its pieces, at their exact sizes.

        Args:
            call: The call of an all-gather, reduce-scatter or all-to-all.
            ranks: The group.
            shard: This rank's part under the step's source.
        """
        known = self._role(call).manifest
        buffers = PackedBuffers(call.step, known, shard, device=self._device)
        if known.is_idle:
            return buffers.result
        return after(self._exchange_buffers(call, ranks, buffers), buffers.result)

    def _shape_after(self, step: BoxingStep) -> tuple[int, ...]:
        """Return the local shape of this rank under the step's target."""
        bounds = bounds_of(step.shape, *step.target)[self.rank]
        return tuple(stop - start for start, stop in bounds)
