"""Draw random forests: fix some nodes of a choice problem such that the free nodes form trees.

    o---o   #===o      # fixed       given the fixed nodes, two sweeps (dynamic programming) give
        |   |   |      o, = trees    the best strategies of all trees; no edge joins two trees
    o---#---#   o

`moves` improves assignments of large problems by such forests.

Source: Hamze and de Freitas, "From fields to trees", UAI 2004.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sbp_planner.choice.compact import Compact, EdgeColumns, Messages, first_least, ragged
from sbp_planner.choice.problem import Floats, Ints

#: The range of the largest tree of a forest: small trees fit more often, large ones find more.
_LARGEST = (40, 400)

#: Forests that are used in turn, and the number of uses after which they are grown again.
_FORESTS = 8
_USES = 12


class _Depth(NamedTuple):
    """The nodes of all trees at one depth.

    Args:
        nodes, columns, first: The nodes, their columns, and the first column of each node.
        parent: For each node its parent; none at depth 0.
        messages: The messages to the parents.
        beside: The columns next to the parents.
    """

    nodes: Ints
    columns: Ints
    first: Ints
    parent: Ints
    messages: Messages
    beside: EdgeColumns


@dataclass(slots=True, eq=False)
class Forest:
    """Free nodes that form trees.

    Attributes:
        tree: For each node its tree; -1 if it is fixed.
        depths: The trees from their roots on.
        border: The columns of free nodes next to fixed neighbours.
        uses: How often it was used.
    """

    tree: Ints
    depths: list[_Depth]
    border: EdgeColumns
    uses: int = 0


class Forests:
    """Draws forests of one problem.

    Args:
        compact: The problem.
        forbidden: A finite cost in place of `inf`.
        seed: Seed of the random trees.
    """

    def __init__(self, compact: Compact, forbidden: float, seed: int = 0) -> None:
        self.compact = compact
        self.entries = np.minimum(compact.flat.entries, forbidden)
        self.random = np.random.default_rng(seed)
        self._around = [
            [(u + v - node, number) for number in own for u, v in [compact.edges[number]]]
            for node, own in enumerate(compact.edges_of)
        ]
        self._forests: list[Forest] = []
        self._turn = 0

    def next(self) -> Forest:
        """Return the next forest; some forests are used in turn."""
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
        """Return the best strategies of all trees, given the fixed nodes.

        Args:
            forest: The trees.
            values: The strategy of each node.
            own: Cost of each column.
        """
        total = own.copy()
        np.add.at(total, forest.border.column, forest.border.costs(self.entries, values))
        for depth in reversed(forest.depths[1:]):
            np.add.at(total, depth.messages.to_column, depth.messages.least(total[depth.columns]))
        result = values.copy()
        for number, depth in enumerate(forest.depths):
            choice = total[depth.columns]
            if number:
                choice = choice + depth.beside.costs(self.entries, result)
            sizes = self.compact.sizes[depth.nodes]
            result[depth.nodes] = first_least(choice, depth.first, sizes)
        return result

    def _grown(self) -> Forest:
        """Fix some nodes, at random, such that the other nodes form small trees."""
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
        return self._rooted(np.array(free))

    def _rooted(self, free: Ints) -> Forest:
        compact, ends = self.compact, self.compact.flat.ends
        tree = np.full(compact.num_nodes, -1, dtype=np.int64)
        # For each depth the nodes, their parents, and the edges to the parents.
        found: list[list[tuple[int, int, int]]] = []
        for start in np.flatnonzero(free).tolist():
            if tree[start] >= 0:
                continue
            tree[start] = start
            layer, depth = [(start, -1, -1)], 0
            while layer:
                if depth == len(found):
                    found.append([])
                found[depth] += layer
                following = []
                for node, _, _ in layer:
                    for other, number in self._around[node]:
                        if free[other] and tree[other] < 0:
                            tree[other] = start
                            following.append((other, node, number))
                layer, depth = following, depth + 1
        depths = []
        for number, layer in enumerate(found):
            nodes, parents, edges = np.array(layer, dtype=np.int64).T
            edges = edges[: len(edges) if number else 0]
            second = ends[edges, 1] == nodes[: len(edges)]
            sizes = compact.sizes[nodes]
            depths.append(
                _Depth(
                    nodes=nodes,
                    columns=ragged(compact.first[nodes], sizes),
                    first=np.cumsum(sizes) - sizes,
                    parent=parents,
                    messages=compact.messages(edges, second),
                    beside=compact.edge_columns(edges, second),
                )
            )
        # Edges between a free node and a fixed one, at their free ends.
        is_free = free[ends]
        edges = np.flatnonzero(is_free[:, 0] != is_free[:, 1])
        border = compact.edge_columns(edges, is_free[edges, 1])
        return Forest(tree=tree, depths=depths, border=border)
