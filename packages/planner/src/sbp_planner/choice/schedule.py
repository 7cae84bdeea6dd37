"""In which steps messages are passed: nodes that do not depend on each other go together.

With an order of the nodes, a node's *level* is the longest path of rising order that leads to it:

    order   1 --> 4 --> 5         levels   0  1  2      one step for each level, whatever its width
            2 --> 3 -----^                 0  1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.tables import ragged

#: Seconds that a step costs beside its arcs, and that an arc costs, about: of numpy.
_STEP_S = 150e-6
_ARC_S = 20e-9

#: Levels that are as good as few.
_FEW_LEVELS = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """Messages over some edges, all in one direction.

    Args:
        edges: Numbers of the edges.
        from_column: Columns of the senders, edge by edge; each with its share.
        from_share: See there.
        heard: Places of the messages that came over the same edges before.
        arc_from: Of each allowed pair the place of its sender's strategy in `from_column`, sorted
            by edge, strategy of the receiver, strategy of the sender.
        arc_cost: Its cost.
        arc_first: Where the pairs of each strategy of a receiver begin.
        to_column: Columns of the receivers.
        said: Places of the messages to them.
        to_first: Where the receivers' strategies of each edge begin.
        to_length: How many they are.
    """

    edges: Ints
    from_column: Ints
    from_share: Floats
    heard: Ints
    arc_from: NDArray[np.int32]
    arc_cost: Floats
    arc_first: Ints
    to_column: Ints
    said: Ints
    to_first: Ints
    to_length: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """Nodes that take their strategies at once, and the edges ahead of them.

    Args:
        nodes: The nodes.
        columns, first: Their columns, and where each node's begin.
        from_node: The node of each edge ahead.
        to_column, to_length: Columns of the other ends, and how many for each edge.
        entry, stride: The entry of the flat tables for strategy 0 of the node and each of those
            columns, and the way to the entry of the next strategy.
    """

    nodes: Ints
    columns: Ints
    first: Ints
    from_node: Ints
    to_column: Ints
    to_length: Ints
    entry: Ints
    stride: Ints


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: what is derived is cached
class Schedule:
    """Steps of a sweep.

    Messages to the earlier ends of the edges, and to the later ones, in edge order, are two flat
    arrays.

    Args:
        swapped: Whether the first end of an edge is the later one.
        behind: Number of edges of each node to nodes before it.
        share: The part of a node's cost that goes over each edge.
        early_column, late_column: Columns that the messages are to.
        ahead, back: Steps.
        levels: For assignments.
        compact: What is scheduled.
    """

    swapped: NDArray[np.bool_]
    behind: Ints
    share: Floats
    early_column: Ints
    late_column: Ints
    ahead: list[Step]
    back: list[Step]
    levels: list[Level]
    compact: Compact

    @cached_property
    def message_places(self) -> tuple[Ints, Ints]:
        """Of each entry of the flat tables the places of the messages to both of its ends."""
        flat, sizes = self.compact.flat, np.diff(self.compact.flat.first)
        place = ragged(np.zeros_like(sizes), sizes)
        widths, swapped = np.repeat(flat.widths, sizes), np.repeat(self.swapped, sizes)
        row, column = place // widths, place % widths
        count = self.compact.sizes
        early = count[np.where(self.swapped, flat.ends[:, 1], flat.ends[:, 0])]
        late = count[np.where(self.swapped, flat.ends[:, 0], flat.ends[:, 1])]
        early_first = np.repeat(np.cumsum(early) - early, sizes)
        late_first = np.repeat(np.cumsum(late) - late, sizes)
        return (
            early_first + np.where(swapped, column, row),
            late_first + np.where(swapped, row, column),
        )

    def least_by_column(self, pairs: Floats) -> Floats:
        """Return for each column the sum, over its edges, of the least entry."""
        flat, compact = self.compact.flat, self.compact
        total = np.zeros(len(compact.cost))
        if not len(flat.widths):
            return total
        rows = flat.rows
        row_first = np.repeat(flat.first[:-1], rows) + ragged(
            np.zeros_like(rows), rows
        ) * np.repeat(flat.widths, rows)
        first = compact.first
        own = ragged(first[flat.ends[:, 0]], rows)
        np.add.at(total, own, np.minimum.reduceat(pairs, row_first))
        # The same by columns: entries are taken in the order of the transposed tables.
        order = flat.transposed()
        column_first = np.cumsum(np.repeat(rows, flat.widths)) - np.repeat(rows, flat.widths)
        own = ragged(first[flat.ends[:, 1]], flat.widths)
        np.add.at(total, own, np.minimum.reduceat(pairs[order], column_first))
        return total


def schedule(compact: Compact) -> Schedule:
    """Return the steps of a problem: by the nodes' numbers, or in an order with fewer levels.

    Numbers are often those of a long program, one operator after the other. The other order takes
    stretches of it side by side: the first nodes of all stretches, then the second ones, and on.
    """
    number = np.arange(compact.num_nodes)
    few = max(_FEW_LEVELS, int(compact.num_arcs * _ARC_S / _STEP_S))
    rank = number
    if _levels(compact, rank, False).max(initial=0) > 2 * few:
        order = np.lexsort((number, number % few))
        rank = np.empty_like(order)
        rank[order] = number
    flat, count = compact.flat, compact.num_nodes
    swapped = rank[flat.ends[:, 0]] > rank[flat.ends[:, 1]]
    early = np.where(swapped, flat.ends[:, 1], flat.ends[:, 0])
    late = np.where(swapped, flat.ends[:, 0], flat.ends[:, 1])
    ahead, behind = np.bincount(early, minlength=count), np.bincount(late, minlength=count)
    share = 1.0 / np.maximum(np.maximum(ahead, behind), 1)
    both = _Edges(compact, swapped, early, late, share)
    rising = _levels(compact, rank, False)
    return Schedule(
        swapped=swapped,
        behind=behind,
        share=share,
        early_column=ragged(compact.first[early], compact.sizes[early]),
        late_column=ragged(compact.first[late], compact.sizes[late]),
        ahead=both.steps(rising[early], to_late=True),
        back=both.steps(_levels(compact, rank, True)[late], to_late=False),
        levels=both.levels(rising),
        compact=compact,
    )


def _levels(compact: Compact, rank: Ints, falling: bool) -> Ints:
    """Return the level of each node in rising, or falling, order."""
    sign = -1 if falling else 1
    before: list[list[int]] = [[] for _ in range(compact.num_nodes)]
    ranks = (sign * rank).tolist()
    for u, v in compact.edges:
        if ranks[u] < ranks[v]:
            before[v].append(u)
        else:
            before[u].append(v)
    level = [0] * compact.num_nodes
    for node in np.argsort(sign * rank, kind="stable").tolist():
        level[node] = max((level[other] + 1 for other in before[node]), default=0)
    return np.array(level, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    compact: Compact
    swapped: NDArray[np.bool_]
    early: Ints
    late: Ints
    share: Floats

    def steps(self, level: Ints, to_late: bool) -> list[Step]:
        """Return the steps, given the level of each edge's sender."""
        return [
            self._step(np.flatnonzero(level == number), to_late)
            for number in range(int(level.max(initial=-1)) + 1)
        ]

    def _step(self, edges: Ints, to_late: bool) -> Step:
        compact = self.compact
        sizes, first = compact.sizes, compact.first
        early, late = self.early, self.late
        sender, receiver = (early, late) if to_late else (late, early)
        message = [np.cumsum(sizes[ends]) - sizes[ends] for ends in (sender, receiver)]
        sent, received = sizes[sender[edges]], sizes[receiver[edges]]
        # Direction `edge` goes from the first end; the later end is the first if swapped.
        back = self.swapped[edges] if to_late else ~self.swapped[edges]
        arcs = compact.arcs
        place, cost, arc_first = arcs.gather(edges + back * len(self.swapped), sizes)
        return Step(
            edges=edges,
            from_column=ragged(first[sender[edges]], sent),
            from_share=np.repeat(self.share[sender[edges]], sent),
            heard=ragged(message[0][edges], sent),
            arc_from=place,
            arc_cost=cost,
            arc_first=arc_first,
            to_column=ragged(first[receiver[edges]], received),
            said=ragged(message[1][edges], received),
            to_first=np.cumsum(received) - received,
            to_length=received,
        )

    def levels(self, level: Ints) -> list[Level]:
        """Return the levels, given that of each node."""
        compact, flat = self.compact, self.compact.flat
        result = []
        edge_level = level[self.early]
        for number in range(int(level.max(initial=-1)) + 1):
            nodes = np.flatnonzero(level == number)
            edges = np.flatnonzero(edge_level == number)
            sizes, lengths = compact.sizes[nodes], compact.sizes[self.late[edges]]
            # Along the other end's strategies, an entry is the next one, or a row farther.
            swapped, widths = self.swapped[edges], flat.widths[edges]
            step = np.repeat(np.where(swapped, widths, 1), lengths)
            place = ragged(np.zeros_like(lengths), lengths)
            result.append(
                Level(
                    nodes=nodes,
                    columns=ragged(compact.first[nodes], sizes),
                    first=np.cumsum(sizes) - sizes,
                    from_node=self.early[edges],
                    to_column=ragged(compact.first[self.late[edges]], lengths),
                    to_length=lengths,
                    entry=np.repeat(flat.first[edges], lengths) + place * step,
                    stride=np.repeat(np.where(swapped, 1, widths), lengths),
                )
            )
        return result
