"""Where a graph can be cut: its order ideals.

An order ideal contains, with a block, all blocks that it depends on. A pipeline of s stages is a
chain of ideals, empty = I_0 < I_1 < ... < I_s = all, whose differences are the stages. A chain of n
blocks has n + 1 ideals, networks with short branches a few hundred; wide graphs have exponentially
many. If there are more than a limit, a family of them is used, and the answer names it:

    coarse   the ideals of a graph whose chains are merged: consecutive blocks of a chain are one
             block as long as it has at most a given share of all seconds and of all parameters; the
             least share out of 1/1024, 1/512, ... 1 for which half the limit is enough
    closed   the ideals that PipeDream's optimizer would look at: from the first source, repeatedly
             united with a successor and all its ancestors; up to 2,000 even if the limit is lower,
             so that the answer is never worse than PipeDream's
    beam     for each number of blocks, the ideals with the fewest bytes crossing, for the rest of
             the limit

Every family gives valid pipelines, and the answer is the best pipeline of the family.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019;
msr-fiddle/pipedream, graph/graph.py (antichain states: the family `closed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sbp_planner.stages.graph import BlockGraph

#: Shares of the whole that a merged block may have, from the finest merging to the coarsest.
_SHARES = tuple(2.0**-exponent for exponent in range(10, -1, -1))

#: Ancestor closures are taken if there are at most so many, even above the limit.
_CLOSED = 2000

#: For sorting by seconds: finer than measurements, and coarse enough for exact sums.
_TICKS_PER_S = 1e9

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ideals:
    """A family of order ideals with their contents; S ideals, sorted by seconds, then by blocks.

    Args:
        masks: The ideals as sets of blocks (bit i is block i); the first is empty, the last is all.
        complete: Whether these are all ideals of the graph.
        family: The name of the family, for people.
        compute_s: Float (S,), seconds of the blocks inside.
        activation_bytes: Float (S,), activations of the blocks inside.
        parameter_bytes: Float (S,), parameters of the blocks inside.
        crossing_bytes: Float (S,), bytes of values made inside and used outside.
        below: Bool (S, S), whether ideal i is a proper subset of ideal j, so that a stage can begin
            at i and end at j.
    """

    masks: tuple[int, ...]
    complete: bool
    family: str
    compute_s: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    crossing_bytes: Floats
    below: Flags

    def some(self, count: int) -> Ideals:
        """Return about `count` ideals, evenly spread over seconds: those with few bytes across."""
        shares = self.compute_s / (self.compute_s[-1] or 1.0)
        bins = np.minimum((shares * count).astype(int), count - 1)
        order = np.lexsort((self.crossing_bytes, bins))
        _, first = np.unique(bins[order], return_index=True)
        chosen = np.unique([0, *order[first], len(self.masks) - 1])
        return Ideals(
            masks=tuple(self.masks[at] for at in chosen),
            complete=False,
            family=self.family,
            compute_s=self.compute_s[chosen],
            activation_bytes=self.activation_bytes[chosen],
            parameter_bytes=self.parameter_bytes[chosen],
            crossing_bytes=self.crossing_bytes[chosen],
            below=self.below[np.ix_(chosen, chosen)],
        )

    def inside(self, sums: Floats) -> Floats:
        """Return the sums over segments, float (S, S); infinite where i is not below j.

        Args:
            sums: Float (S,), the sum over the blocks inside each ideal.
        """
        return np.where(self.below, sums[None, :] - sums[:, None], np.inf)


def order_ideals(graph: BlockGraph, limit: int) -> Ideals:
    """Return the order ideals of a graph; if there are more than `limit`, a family of about that.

    Args:
        graph: The graph to cut.
        limit: Most ideals that are considered; at least the number of blocks, plus 1.
    """
    limit = max(limit, len(graph.blocks) + 1)
    masks = _all_ideals(graph.predecessors, limit)
    if masks is not None:
        return _measured(graph, masks, complete=True, family="all order ideals")
    found: set[int] = {0, (1 << len(graph.blocks)) - 1}
    parts: list[str] = []
    for share in _SHARES:
        coarse = _coarse_ideals(graph, share, limit // 2)
        if coarse is not None:
            found.update(coarse)
            parts.append(f"chains merged up to 1/{round(1 / share)} of the whole")
            break
    closed = _closed_ideals(graph, max(limit, _CLOSED))
    if closed is not None:
        found.update(closed)
        parts.append("ancestor closures from the first source")
    # A beam keeps at least one for each number of blocks.
    width = max((limit - len(found)) // len(graph.blocks), 1)
    found.update(_beam(graph, width))
    parts.append(f"the {width} of each number of blocks with the fewest bytes crossing")
    return _measured(graph, found, complete=False, family="; ".join(parts))


def _all_ideals(predecessors: Sequence[int], limit: int) -> set[int] | None:
    """Return all ideals; None if there are more than the limit."""
    found = {0}
    newest = [0]
    while newest:
        following: list[int] = []
        for mask in newest:
            for at, needed in enumerate(predecessors):
                wider = mask | 1 << at
                if wider != mask and not needed & ~mask and wider not in found:
                    found.add(wider)
                    following.append(wider)
            if len(found) > limit:
                return None
        newest = following
    return found


def _coarse_ideals(graph: BlockGraph, share: float, limit: int) -> set[int] | None:
    """Return the ideals of the graph with merged chains; None if there are more than the limit."""
    groups = _merged_chains(graph, share)
    group_of = {at: number for number, group in enumerate(groups) for at in group}
    needed = [0] * len(groups)
    for at, mask in enumerate(graph.predecessors):
        for before in _bits(mask):
            if group_of[before] != group_of[at]:
                needed[group_of[at]] |= 1 << group_of[before]
    coarse = _all_ideals(needed, limit)
    if coarse is None:
        return None
    masks = [sum(1 << at for at in group) for group in groups]
    return {sum(masks[number] for number in _bits(one)) for one in coarse}


def _merged_chains(graph: BlockGraph, share: float) -> list[list[int]]:
    """Return groups of consecutive blocks of a chain, none above a share of the whole."""
    blocks = graph.blocks
    seconds = sum(block.compute_s for block in blocks) or 1.0
    size = sum(block.parameter_bytes for block in blocks) or 1.0
    weights = [max(block.compute_s / seconds, block.parameter_bytes / size) for block in blocks]
    groups: dict[int, list[int]] = {}  # by the last block of the group
    for at in graph.order:
        before = graph.predecessors[at]
        only = before.bit_length() - 1 if before.bit_count() == 1 else None
        group = [at]
        if only is not None and len(graph.successors[only]) == 1:
            longer = [*groups[only], at]
            if sum(weights[one] for one in longer) <= share:
                del groups[only]
                group = longer
        groups[at] = group
    return list(groups.values())


def _closed_ideals(graph: BlockGraph, limit: int) -> set[int] | None:
    """Return the ideals that PipeDream's optimizer looks at; None if there are too many."""
    first = next(at for at, mask in enumerate(graph.predecessors) if not mask)
    found = {1 << first}
    newest = [1 << first]
    while newest and len(found) <= limit:
        following: list[int] = []
        for mask in newest:
            for at in {follower for one in _bits(mask) for follower in graph.successors[one]}:
                wider = mask | graph.ancestors[at] | 1 << at
                if wider not in found:
                    found.add(wider)
                    following.append(wider)
        newest = following
    return found if len(found) <= limit else None


def _beam(graph: BlockGraph, width: int) -> set[int]:
    """Return, for every number of blocks, the ideals that the fewest bytes cross."""
    found = {0}
    kept = {0: 0.0}
    for _ in graph.blocks:
        wider = {
            mask | 1 << at
            for mask in kept
            for at, needed in enumerate(graph.predecessors)
            if not mask >> at & 1 and not needed & ~mask
        }
        crossing = {mask: graph.crossing_bytes(mask) for mask in wider}
        kept = dict(sorted(crossing.items(), key=lambda entry: (entry[1], entry[0]))[:width])
        found.update(kept)
    return found


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _measured(graph: BlockGraph, masks: Iterable[int], *, complete: bool, family: str) -> Ideals:
    found = sorted(masks)
    num_blocks = len(graph.blocks)
    width = (num_blocks + 7) // 8
    packed = b"".join(mask.to_bytes(width, "little") for mask in found)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(found), width)
    members = np.unpackbits(rows, axis=1, count=num_blocks, bitorder="little").astype(np.bool_)
    costs = np.array(
        [(b.compute_s, b.activation_bytes, b.parameter_bytes) for b in graph.blocks], dtype=float
    )
    # Seconds in whole ticks: their sums are exact, so a larger ideal never has fewer.
    order = np.lexsort((members.sum(axis=1), members @ np.ceil(costs[:, 0] * _TICKS_PER_S)))
    ordered = tuple(found[at] for at in order)
    members = members[order]
    inside = members.astype(np.float64) @ costs
    crossing = np.zeros(len(ordered))
    for flow in graph.flows:
        consumers = [graph.index[name] for name in flow.consumers]
        if consumers:
            crosses = members[:, graph.index[flow.producer]] & ~members[:, consumers].all(axis=1)
            crossing[crosses] += flow.num_bytes
    small = members.astype(np.float32)
    below = small @ (1 - small).T == 0
    np.fill_diagonal(below, False)
    return Ideals(
        masks=ordered,
        complete=complete,
        family=family,
        compute_s=inside[:, 0],
        activation_bytes=inside[:, 1],
        parameter_bytes=inside[:, 2],
        crossing_bytes=crossing,
        below=below,
    )
