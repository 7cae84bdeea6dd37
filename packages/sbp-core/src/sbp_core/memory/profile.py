"""The memory of a rank over a step: how much of each kind is alive at each moment.

    ticks         0   1   2   3   4
    parameters    4   4   4   4   4
    activations   0   2   5   2   0
    temporaries   0   3   0   1   0

Ticks are those of `lifetime`: one for each instruction or boxing step of the rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbp_core.memory.kinds import MemoryKind
from sbp_core.memory.ledger import Buffer
from sbp_core.memory.lifetime import alive_bytes
from sbp_core.memory.storages import RankLifetimes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What one rank holds over a step.

    Args:
        rank: Whose.
        ticks: For each tick, the actor, the index of its firing, and the node it is in; those of
            the first one, before anything fires, are empty.
        kinds: For each kind that the rank ever holds, its bytes at each tick.
    """

    rank: int
    ticks: Sequence[tuple[str, int, str]]
    kinds: Mapping[MemoryKind, Sequence[int]]

    @property
    def total(self) -> list[int]:
        """Bytes alive at each tick."""
        return [sum(sizes) for sizes in zip(*self.kinds.values(), strict=True)]


def memory_profile(lifetimes: RankLifetimes) -> MemoryProfile:
    """Return what a rank holds at each tick, by kind.

    Args:
        lifetimes: Of its storages.
    """
    buffers: dict[MemoryKind, list[Buffer]] = defaultdict(list)
    for buffer in lifetimes.buffers:
        buffers[buffer.kind].append(buffer)
    return MemoryProfile(
        rank=lifetimes.rank,
        ticks=lifetimes.ticks,
        kinds={
            kind: alive_bytes(buffers[kind], len(lifetimes.ticks))
            for kind in MemoryKind
            if kind in buffers
        },
    )
