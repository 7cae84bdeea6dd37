"""Forests: some nodes are held such that the free ones form trees, drawn at random.

    o---o   #===o      # held        given the held ones, the best strategies of all trees follow
        |   |   |      o, = trees    from two sweeps (dynamic programming); no edge joins two trees
    o---#---#   o

Source: Hamze and de Freitas, "From fields to trees", UAI 2004.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.tables import first_least, ragged

#: Nodes of a tree, at most, drawn for each forest: small ones fit more often, large ones see more.
_LARGEST = (40, 400)

#: Forests that are grown before the first is used again; they are grown anew after so many uses.
_FORESTS = 8
_USES = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Depth:
    """The nodes of all trees at one depth.

    Args:
        nodes, columns, first: The nodes, their columns, and where each node's begin.
        parent: Of each node; none at depth 0.
        parent_column: Columns of the parents, node by node.
        arc_from, arc_cost, arc_first: Allowed pairs, sorted by node, strategy of its parent,
            strategy of the node; see `Arcs.gather`.
        entry, stride: For each column the entry of the flat tables for strategy 0 of the parent,
            and the way to the entry of its next strategy.
    """

    nodes: Ints
    columns: Ints
    first: Ints
    parent: Ints
    parent_column: Ints
    arc_from: NDArray[np.int32]
    arc_cost: Floats
    arc_first: Ints
    entry: Ints
    stride: Ints


@dataclass(slots=True, eq=False)
class Forest:
    """Free nodes that form trees.

    Attributes:
        tree: Of each node its tree; -1 if it is held.
        depths: The trees from their roots on.
        border: For each column of a free node and held neighbour: the neighbour, the column, the
            entry for strategy 0 of the neighbour, and the way to that of its next strategy.
        uses: How often it was used.
    """

    tree: Ints
    depths: list[_Depth]
    border: tuple[Ints, Ints, Ints, Ints]
    uses: int = 0


class Forests:
    """Draws forests of one problem.

    Args:
        compact: The problem.
        forbidden: In place of inf.
        seed: Of the random trees.
    """

    def __init__(self, compact: Compact, forbidden: float, seed: int = 0) -> None:
        self.compact = compact
        self.entries = np.minimum(compact.flat.entries, forbidden)
        self.random = np.random.default_rng(seed)
        self._around: list[list[tuple[int, int]]] = [[] for _ in range(compact.num_nodes)]
        for number, (u, v) in enumerate(compact.edges):
            self._around[u].append((v, number))
            self._around[v].append((u, number))
        self._forests: list[Forest] = []
        self._turn = 0

    def next(self) -> Forest:
        """Return a forest, of some that are used in turn."""
        self._turn = (self._turn + 1) % _FORESTS
        if len(self._forests) < _FORESTS:
            self._forests.append(self._grown())
            return self._forests[-1]
        forest = self._forests[self._turn]
        if forest.uses >= _USES:
            forest = self._forests[self._turn] = self._grown()
        forest.uses += 1
        return forest

    def best(self, forest: Forest, values: Ints, own: Floats) -> Ints:
        """Return the best strategies of all trees, the rest held.

        Args:
            forest: The trees.
            values: The strategy of each node.
            own: Cost of each column.
        """
        neighbour, column, entry, stride = forest.border
        total = own.copy()
        np.add.at(total, column, self.entries[entry + values[neighbour] * stride])
        for depth in reversed(forest.depths[1:]):
            part = total[depth.columns]
            least = np.minimum.reduceat(part[depth.arc_from] + depth.arc_cost, depth.arc_first)
            np.add.at(total, depth.parent_column, least)
        result = values.copy()
        sizes = self.compact.sizes
        for number, depth in enumerate(forest.depths):
            choice, lengths = total[depth.columns], sizes[depth.nodes]
            if number:
                taken = np.repeat(result[depth.parent], lengths)
                choice = choice + self.entries[depth.entry + taken * depth.stride]
            result[depth.nodes] = first_least(choice, depth.first, lengths)
        return result

    def _grown(self) -> Forest:
        """Hold some nodes, at random, such that the others form small trees."""
        count = self.compact.num_nodes
        leader = list(range(count))
        size = [1] * count
        free = [False] * count
        largest = int(np.exp(self.random.uniform(*np.log(_LARGEST))))

        def root(node: int) -> int:
            while leader[node] != node:
                leader[node] = leader[leader[node]]
                node = leader[node]
            return node

        for node in self.random.permutation(count).tolist():
            beside = [root(other) for other, _ in self._around[node] if free[other]]
            together = 1 + sum(size[tree] for tree in beside)
            if together > largest or len(set(beside)) < len(beside):
                continue
            free[node] = True
            for tree in beside:
                leader[tree] = node
            size[node] = together
        return self._rooted(free)

    def _rooted(self, free: list[bool]) -> Forest:
        compact = self.compact
        tree = np.full(compact.num_nodes, -1, dtype=np.int64)
        parents: list[list[int]] = [[]]
        edges: list[list[int]] = [[]]
        nodes: list[list[int]] = [[]]
        for start in range(compact.num_nodes):
            if not free[start] or tree[start] >= 0:
                continue
            tree[start] = start
            layer, depth = [start], 0
            nodes[0].append(start)
            while layer:
                depth += 1
                if depth == len(nodes):
                    nodes.append([])
                    parents.append([])
                    edges.append([])
                following = []
                for node in layer:
                    for other, number in self._around[node]:
                        if free[other] and tree[other] < 0:
                            tree[other] = start
                            nodes[depth].append(other)
                            parents[depth].append(node)
                            edges[depth].append(number)
                            following.append(other)
                layer = following
        depths = [
            self._depth(*(np.array(part, dtype=np.int64) for part in parts))
            for parts in zip(nodes, parents, edges, strict=True)
            if parts[0]
        ]
        return Forest(tree=tree, depths=depths, border=self._border(np.array(free)))

    def _depth(self, nodes: Ints, parents: Ints, edges: Ints) -> _Depth:
        compact, flat = self.compact, self.compact.flat
        sizes = compact.sizes[nodes]
        columns = ragged(compact.first[nodes], sizes)
        empty = np.zeros(0, dtype=np.int64)
        place, cost, arc_first = empty.astype(np.int32), np.zeros(0), empty
        parent_column = entry = stride = empty
        if len(edges):
            # Direction `edge` goes from the first end.
            from_second = flat.ends[edges, 1] == nodes
            directions = edges + from_second * len(compact.edges)
            place, cost, arc_first = compact.arcs.gather(directions, compact.sizes)
            parent_column = ragged(compact.first[parents], compact.sizes[parents])
            entry, stride = self._entries(edges, from_second, sizes)
        return _Depth(
            nodes=nodes,
            columns=columns,
            first=np.cumsum(sizes) - sizes,
            parent=parents,
            parent_column=parent_column,
            arc_from=place,
            arc_cost=cost,
            arc_first=arc_first,
            entry=entry,
            stride=stride,
        )

    def _entries(self, edges: Ints, second: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """Return, by strategy of one end, the entry for strategy 0 of the other, and the stride.

        Args:
            edges: The edges.
            second: Whether the one end is the second.
            sizes: Its strategies.
        """
        flat = self.compact.flat
        widths = flat.widths[edges]
        place = ragged(np.zeros_like(sizes), sizes)
        entry = np.repeat(flat.first[edges], sizes)
        entry += place * np.repeat(np.where(second, 1, widths), sizes)
        return entry, np.repeat(np.where(second, widths, 1), sizes)

    def _border(self, free: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        compact, flat = self.compact, self.compact.flat
        parts = []
        for end in (0, 1):
            edges = np.flatnonzero(free[flat.ends[:, end]] & ~free[flat.ends[:, 1 - end]])
            nodes = flat.ends[edges, end]
            sizes = compact.sizes[nodes]
            entry, stride = self._entries(edges, np.full(len(edges), end == 1), sizes)
            held = np.repeat(flat.ends[edges, 1 - end], sizes)
            parts.append((held, ragged(compact.first[nodes], sizes), entry, stride))
        held, column, entry, stride = (np.concatenate(part) for part in zip(*parts, strict=True))
        return held, column, entry, stride
