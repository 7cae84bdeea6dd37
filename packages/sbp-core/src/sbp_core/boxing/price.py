"""What a route costs in time on a machine: the α-β model of every step.

α is the latency of a message in seconds, β the seconds per byte of the slowest link that the step
uses, n the ranks of one group, S the bytes of the tensor piece that a group shares (the part of the
logical tensor that its ranks hold together). The groups of one mesh axis work at the same time; the
slowest one counts. Bytes are in the steps themselves. Imports no torch.

Source: the ring costs are the standard ones, as in Thakur, Rabenseifner and Gropp, "Optimization
of Collective Communication Operations in MPICH" (2005), section 4, and in the cost model of OSDP
(Jiang et al., 2023). All-to-all is the pairwise exchange: n-1 messages of one nth of a shard.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from sbp_core.boxing.slices import bounds_of, itemsize, transfer_pieces, volume
from sbp_core.boxing.step import Route, Step, StepKind

if TYPE_CHECKING:
    from sbp_core.placement import Cluster


def route_time_s(route: Route, cluster: Cluster) -> float:
    """Return the time of a route in seconds: its steps one after the other."""
    return sum(step_time_s(step, cluster) for step in route.steps)


def step_time_s(step: Step, cluster: Cluster) -> float:
    """Return the time of one step in seconds.

    * all-reduce: 2 (n-1) (α + β S/n)
    * all-gather, reduce-scatter: (n-1) (α + β S/n)
    * all-to-all: (n-1) (α + β S/n²)
    * transfer: the largest sum of α + β · bytes over the messages that one rank sends, or receives;
      all pieces from one rank to another are one message
    * local: 0
    """
    if step.kind is StepKind.LOCAL:
        return 0.0
    if step.kind is StepKind.TRANSFER:
        return _transfer_time_s(step, cluster)
    return max(
        (_ring_time_s(step.kind, group, size, cluster) for group, size in _shared_bytes(step)),
        default=0.0,
    )


def _ring_time_s(kind: StepKind, ranks: tuple[int, ...], size: int, cluster: Cluster) -> float:
    n, S = len(ranks), size  # noqa: N806 (the letters of the formula)
    link = cluster.link(ranks)
    α, β = link.latency_s, 1 / link.bytes_per_s
    if kind is StepKind.ALL_TO_ALL:
        return (n - 1) * (α + β * S / n**2)
    rounds = 2 if kind is StepKind.ALL_REDUCE else 1
    return rounds * (n - 1) * (α + β * S / n)


@lru_cache(maxsize=4096)
def _shared_bytes(step: Step) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return (ranks, bytes of the piece they share) of each group of a collective."""
    placement, _ = step.source
    held = bounds_of(step.shape, *step.source)
    wanted = bounds_of(step.shape, *step.target)
    size = itemsize(step.dtype)

    def piece(group: tuple[int, ...]) -> int:
        if step.kind is StepKind.ALL_GATHER:
            return volume(wanted[group[0]])
        if step.kind is StepKind.ALL_TO_ALL:
            return sum(volume(held[rank]) for rank in group)
        return volume(held[group[0]])

    return tuple((group, piece(group) * size) for group in placement.groups(*step.axes))


@lru_cache(maxsize=4096)
def transfer_messages(step: Step) -> tuple[tuple[int, int, int], ...]:
    """Return (sender, receiver, bytes) of each message of a `TRANSFER` between different ranks."""
    messages: dict[tuple[int, int], int] = defaultdict(int)
    for piece in transfer_pieces(step):
        if piece.sender != piece.receiver:
            messages[piece.sender, piece.receiver] += piece.size_bytes
    return tuple((sender, receiver, size) for (sender, receiver), size in messages.items())


def _transfer_time_s(step: Step, cluster: Cluster) -> float:
    sends: dict[int, float] = defaultdict(float)
    receives: dict[int, float] = defaultdict(float)
    for sender, receiver, size in transfer_messages(step):
        link = cluster.link((sender, receiver))
        time_s = link.latency_s + size / link.bytes_per_s
        sends[sender] += time_s
        receives[receiver] += time_s
    return max((*sends.values(), *receives.values()), default=0.0)
