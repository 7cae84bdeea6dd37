"""`BlockGraph`: the graph that planners cut into pipeline stages: blocks with costs, and values.

A block is anything that stays whole: an operator of a profile, a layer, a module. Values are
separate from blocks, because a value with several consumers crosses a cut once, however many of its
consumers are on the other side. `model_blocks` makes it of a model, `profile` of PipeDream's files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomicBlock:
    """A piece of the model that no cut divides; its costs are for one micro-batch on one device.

    Args:
        name: Unique in its graph.
        forward_s: Seconds of the forward pass, at least 0.
        backward_s: Seconds of the backward pass, at least 0.
        activation_bytes: Bytes that are kept from forward to backward.
        parameter_bytes: Bytes of one version of its parameters.
    """

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    activation_bytes: float = 0
    parameter_bytes: float = 0

    def __post_init__(self) -> None:
        costs = (self.forward_s, self.backward_s, self.activation_bytes, self.parameter_bytes)
        if not all(0 <= cost < float("inf") for cost in costs):
            raise SbpValueError(f"{self} is no block", accepted="finite seconds and bytes >= 0")

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A value that one block makes and others use.

    Args:
        producer: Name of the block.
        consumers: Names of the blocks that use it.
        num_bytes: Its size; a cut between the producer and any consumer sends it forward, and its
            gradient, of the same size, backward.
    """

    producer: str
    consumers: tuple[str, ...]
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    """A directed acyclic graph of blocks.

    Args:
        blocks: At least one block, in any order.
        flows: The values between blocks; they define the edges.

    Raises:
        SbpValueError: Two blocks have one name, a flow names an unknown block, or there is a cycle.
    """

    blocks: tuple[AtomicBlock, ...]
    flows: tuple[Flow, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks:
            raise SbpValueError("a graph without blocks has no stages", accepted="one or more")
        twice = [name for name, n in Counter(b.name for b in self.blocks).items() if n > 1]
        if twice:
            raise SbpValueError(f"two blocks have the name {twice[0]!r}", accepted="unique names")
        for flow in self.flows:
            for name in (flow.producer, *flow.consumers):
                if name not in self.index:
                    raise SbpValueError(f"{flow} names a block {name!r} that is none")
        assert len(self.order) == len(self.blocks)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each block in `blocks`."""
        return {block.name: at for at, block in enumerate(self.blocks)}

    @cached_property
    def predecessors(self) -> tuple[int, ...]:
        """For each block, the set of the blocks that it uses; bit i represents block i."""
        masks = [0] * len(self.blocks)
        for producer, followers in enumerate(self.successors):
            for follower in followers:
                masks[follower] |= 1 << producer
        return tuple(masks)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each block, the blocks that use its values."""
        found: list[dict[int, None]] = [{} for _ in self.blocks]
        for flow in self.flows:
            for name in flow.consumers:
                found[self.index[flow.producer]][self.index[name]] = None
        return tuple(tuple(own) for own in found)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The blocks in topological order; where several are possible, in the order of `blocks`.

        Raises:
            SbpValueError: There is a cycle.
        """
        missing = [mask.bit_count() for mask in self.predecessors]
        ready = [at for at, count in enumerate(missing) if not count][::-1]
        order: list[int] = []
        while ready:
            at = ready.pop()
            order.append(at)
            for follower in reversed(self.successors[at]):
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        if len(order) < len(self.blocks):
            done = set(order)
            stuck = [block.name for at, block in enumerate(self.blocks) if at not in done]
            raise SbpValueError(
                f"blocks {', '.join(stuck[:5])} wait for each other: there is a cycle",
                accepted="an acyclic graph",
            )
        return tuple(order)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each block, the set of all blocks that it depends on, without itself."""
        found = [0] * len(self.blocks)
        for at in self.order:
            for follower in self.successors[at]:
                found[follower] |= found[at] | 1 << at
        return tuple(found)

    def names(self, members: int) -> tuple[str, ...]:
        """Return the names of a set of blocks, in dependency order."""
        return tuple(self.blocks[at].name for at in self.order if members >> at & 1)

    def crossing_bytes(self, members: int) -> float:
        """Return the bytes made inside a set of blocks and used outside, each value once."""
        return sum(
            num_bytes
            for producer, consumers, num_bytes in self._flow_masks
            if members & producer and consumers & ~members
        )

    @cached_property
    def _flow_masks(self) -> tuple[tuple[int, int, float], ...]:
        """For each flow, its producer and its consumers, as sets, and its bytes."""
        return tuple(
            (
                1 << self.index[flow.producer],
                sum(1 << self.index[name] for name in set(flow.consumers)),
                flow.num_bytes,
            )
            for flow in self.flows
        )


def chain(blocks: Iterable[AtomicBlock], boundary_bytes: Sequence[float]) -> BlockGraph:
    """Return a sequence of blocks, each using the one before.

    Args:
        blocks: The blocks, in order.
        boundary_bytes: Bytes between each block and the next: one entry fewer than blocks.
    """
    found = tuple(blocks)
    flows = tuple(
        Flow(producer=one.name, consumers=(other.name,), num_bytes=size)
        for (one, other), size in zip(pairwise(found), boundary_bytes, strict=True)
    )
    return BlockGraph(blocks=found, flows=flows)
