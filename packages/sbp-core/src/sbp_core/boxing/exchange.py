"""A communicator for ranks that share no memory: what is common to all transports of flat tensors.

It knows who sends which pieces to whom, checks, counts bytes, and packs and unpacks parcels. How
long to wait, what to say if nobody comes, and the collectives that a transport has of its own stay
with the transport. Knows torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch

from sbp_core.boxing.backend import Communicator
from sbp_core.boxing.call import Call
from sbp_core.boxing.connections import Connections
from sbp_core.boxing.execute import check_shard, combine, torch_dtype
from sbp_core.boxing.parcel import num_elements, pack, unpack
from sbp_core.boxing.slices import Piece, sent_bytes, transfer_pieces
from sbp_core.boxing.step import Step

ConnectionsT = TypeVar("ConnectionsT", bound=Connections)


class ExchangeCommunicator(Communicator, Generic[ConnectionsT]):
    """One rank's ends, over the connections of its process.

    A subclass brings the four methods that move flat tensors: shape (elements,), contiguous, of the
    step's dtype. Each of them raises `BoxingError` when the call's time is over, or when another
    rank has failed.

    Args:
        connections: Of this process.
        rank: The rank that this process is.
        device: Where results are made.
    """

    def __init__(self, connections: ConnectionsT, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.sent_bytes = 0
        self._connections = connections
        self._device = device

    def collective(
        self,
        step: Step,
        shard: torch.Tensor,
        *,
        tag: str,
        deadline_s: float,
        donate: bool = False,
    ) -> torch.Tensor:
        """See `Communicator.collective`."""
        call = self._begin(step, tag, deadline_s)
        check_shard(step, self.rank, shard)
        ranks = step.group(self.rank)
        if len(ranks) == 1:
            return shard
        result = self._collective(call, ranks, shard)
        self.sent_bytes += sent_bytes(step, self.rank)
        return result

    def send(self, step: Step, shard: torch.Tensor, *, tag: str, deadline_s: float) -> None:
        """See `Communicator.send`."""
        call = self._begin(step, tag, deadline_s)
        check_shard(step, self.rank, shard)
        outgoing: dict[int, list[Piece]] = {}
        for piece in transfer_pieces(step):
            if piece.sender == self.rank != piece.receiver:
                outgoing.setdefault(piece.receiver, []).append(piece)
        for receiver, pieces in outgoing.items():
            # A copy: the shard is the caller's to drop, and may be a view of something larger.
            self._post(call, receiver, pack(shard, pieces).to(self._device, copy=True))
        self.sent_bytes += sent_bytes(step, self.rank)

    def receive(
        self, step: Step, shard: torch.Tensor | None, *, tag: str, deadline_s: float
    ) -> torch.Tensor:
        """See `Communicator.receive`."""
        call = self._begin(step, tag, deadline_s)
        mine = [piece for piece in transfer_pieces(step) if piece.receiver == self.rank]
        by_sender: dict[int, list[Piece]] = {}
        for piece in mine:
            by_sender.setdefault(piece.sender, []).append(piece)
        parcels: dict[int, torch.Tensor] = {}
        if self.rank in by_sender:
            if shard is None:
                raise call.failed("this rank is a sender too, and gave no shard to receive()")
            check_shard(step, self.rank, shard)
            parcels[self.rank] = pack(shard, by_sender.pop(self.rank))
        arriving = {
            sender: self._empty(step, num_elements(step, pieces))
            for sender, pieces in by_sender.items()
        }
        self._collect(call, arriving)
        return self._unpack(step, mine, parcels | arriving)

    @abstractmethod
    def _collective(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        """Run a collective among the ranks of a group: two or more, in mesh order.

        Args:
            call: Its step is of any kind but `TRANSFER` and `LOCAL`.
            ranks: The group.
            shard: This rank's part under the step's source, checked.

        Returns:
            This rank's part under the step's target.
        """

    @abstractmethod
    def _post(self, call: Call, receiver: int, values: torch.Tensor) -> None:
        """Send a message; does not wait for the receiver.

        Args:
            call: The call that sends it.
            receiver: Rank that it goes to.
            values: On the communicator's device; nobody else uses them.
        """

    @abstractmethod
    def _collect(self, call: Call, arriving: Mapping[int, torch.Tensor]) -> None:
        """Fill each tensor with the message of its sender for the call's tag."""

    @abstractmethod
    def _trade(
        self,
        call: Call,
        ranks: tuple[int, ...],
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        """Send consecutive chunks of `sent` to the ranks in order, and receive theirs likewise.

        Args:
            call: The call that does so.
            ranks: The group.
            received: To be filled.
            sent: On the shard's device.
            received_sizes: Elements from each rank, in order; 0 for this one.
            sent_sizes: Elements to each rank, in order; 0 for this one.
        """

    def _begin(self, step: Step, tag: str, deadline_s: float) -> Call:
        """Make the call of a step, if the connections can be used."""
        call = Call.begin(step, tag, self.rank, deadline_s)
        self._connections.check_usable(call)
        return call

    def _exchange(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor, pieces: Sequence[Piece]
    ) -> torch.Tensor:
        """Run a collective by sending each rank its pieces, at their exact sizes.

        Args:
            call: Of an all-gather, reduce-scatter or all-to-all.
            ranks: The group.
            shard: This rank's part under the step's source.
            pieces: What `collective_pieces` says for the group.
        """
        step = call.step
        mine = [piece for piece in pieces if piece.receiver == self.rank]
        own = pack(shard, [piece for piece in mine if piece.sender == self.rank])
        others = [piece for piece in pieces if piece.sender != piece.receiver]
        outgoing = [
            [piece for piece in others if (piece.sender, piece.receiver) == (self.rank, rank)]
            for rank in ranks
        ]
        incoming = [
            [piece for piece in others if (piece.sender, piece.receiver) == (rank, self.rank)]
            for rank in ranks
        ]
        sizes_in = [num_elements(step, given) for given in incoming]
        sizes_out = [num_elements(step, given) for given in outgoing]
        received = self._empty(step, sum(sizes_in))
        if others:
            sent = torch.cat([pack(shard, given) for given in outgoing])
            self._trade(call, ranks, received, sent, sizes_in, sizes_out)
        parcels = dict(zip(ranks, torch.split(received, sizes_in), strict=True))
        return self._unpack(step, mine, parcels | {self.rank: own})

    def _unpack(
        self, step: Step, pieces: Sequence[Piece], parcels: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """Return the shard that this rank's pieces make; `parcels` as in `parcel.unpack`."""
        return combine(step, self.rank, unpack(pieces, parcels), device=self._device)

    def _empty(self, step: Step, elements: int) -> torch.Tensor:
        """Return a flat tensor of the step's dtype to receive into."""
        return torch.empty(elements, dtype=torch_dtype(step.dtype), device=self._device)
