"""Improve an assignment tree by tree: many small changes at once, with prices for memory.

Some nodes are held such that the free ones form trees. Given the held ones, the best strategies of
a tree at present prices follow from two sweeps over it (dynamic programming), of all trees at once:

    o---o   #===o      # held        each tree: what it costs more or less, and what bytes it frees
        |   |   |      o, = trees               or takes; no edge joins two trees, so costs add up
    o---#---#   o

A tree whose change costs less is taken if what it holds fits. Where memory is short a change that
costs more may free what others make better use of: all that the prices call for are taken, first
those that free memory, then the others while they fit; the costs alone decide whether that stays.

Source: Hamze and de Freitas, "From fields to trees", UAI 2004 (trees given the rest, there drawn at
random); Savchynskyy et al., "Getting feasible variable estimates from infeasible ones", 2012.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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


class TreeMoves:
    """Improves assignments of one problem.

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
        # Spans of each column: places in the order of columns.
        self._span_order = np.argsort(compact.held_column, kind="stable")
        columns = np.arange(len(compact.cost) + 1)
        self._span_first = np.searchsorted(compact.held_column[self._span_order], columns)

    def improve(self, values: Ints, prices: Floats) -> Ints:
        """Return an assignment that costs no more, or exceeds capacities less, by one forest.

        No row gets farther above its capacity than it is.

        Args:
            values: The strategy of each node.
            prices: λ of each row, in cost a byte.
        """
        forest = self._next()
        own = self._priced(prices)
        proposed = self._best(forest, values, own)
        changed = np.flatnonzero(proposed != values)
        if not len(changed):
            return values
        trees, cost, priced = self._differences(forest, values, proposed, changed, own)
        frees = np.flatnonzero((cost > 0) & (priced < 0))
        others = np.flatnonzero(cost <= 0)
        others = others[np.argsort(np.minimum(priced, cost)[others], kind="stable")]
        spans = self._spans(forest, values, proposed, changed, trees)
        usage = self.compact.excess(values)
        order = np.concatenate([frees[np.argsort(priced[frees], kind="stable")], others])
        room = _Room(usage, spans)
        chosen = [tree for tree in order.tolist() if room.takes(tree)]
        fits = not len(usage) or usage.max() <= 0
        if fits and len(frees):
            # What freed memory that nothing made use of is taken back, the dearest first.
            dearest = frees[np.argsort(-cost[frees], kind="stable")].tolist()
            needless = {tree for tree in dearest if tree in room.taken and room.returns(tree)}
            chosen = [tree for tree in chosen if tree not in needless]
            if cost[chosen].sum() >= 0:
                room = _Room(usage, spans)
                chosen = [tree for tree in others.tolist() if room.takes(tree)]
        return _with(values, proposed, changed[np.isin(forest.tree[changed], trees[chosen])])

    def drawn(self, values: Ints, prices: Floats, temperature: float) -> Ints:
        """Return an assignment drawn at random, the more likely the less it costs, by one forest.

        Each strategy's cost has noise added (Gumbel), as much as the temperature. No row gets
        farther above its capacity than it is.

        Args:
            values: The strategy of each node.
            prices: λ of each row, in cost a byte.
            temperature: In terms of cost.
        """
        forest = self._next()
        own = self._priced(prices)
        noise = temperature * self.random.gumbel(size=len(own))
        proposed = self._best(forest, values, own - noise)
        changed = np.flatnonzero(proposed != values)
        if not len(changed):
            return values
        trees, *_ = self._differences(forest, values, proposed, changed, own)
        spans = self._spans(forest, values, proposed, changed, trees)
        room = _Room(self.compact.excess(values), spans)
        order = self.random.permutation(len(trees)).tolist()
        chosen = [tree for tree in order if room.takes(tree)]
        return _with(values, proposed, changed[np.isin(forest.tree[changed], trees[chosen])])

    def _next(self) -> Forest:
        self._turn = (self._turn + 1) % _FORESTS
        if len(self._forests) < _FORESTS:
            self._forests.append(self._grown())
            return self._forests[-1]
        forest = self._forests[self._turn]
        if forest.uses >= _USES:
            forest = self._forests[self._turn] = self._grown()
        forest.uses += 1
        return forest

    def _priced(self, prices: Floats) -> Floats:
        compact = self.compact
        if not len(prices):
            return compact.cost
        before = np.concatenate([[0.0], np.cumsum(prices)])
        paid = compact.held_bytes * (before[compact.held_end] - before[compact.held_first])
        own: Floats = compact.cost + np.bincount(
            compact.held_column, paid, minlength=len(compact.cost)
        )
        return own

    def _best(self, forest: Forest, values: Ints, own: Floats) -> Ints:
        """Return the best strategies of all trees, the rest held."""
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

    def _differences(
        self, forest: Forest, values: Ints, proposed: Ints, changed: Ints, own: Floats
    ) -> tuple[Ints, Floats, Floats]:
        """Return the trees that change, what that costs more, and what at the prices."""
        compact, flat = self.compact, self.compact.flat
        trees, place = np.unique(forest.tree[changed], return_inverse=True)
        old, new = compact.first[changed] + values[changed], compact.first[changed]
        new = new + proposed[changed]
        count = len(trees)
        cost = np.bincount(place, compact.cost[new] - compact.cost[old], count).astype(np.float64)
        priced = np.bincount(place, own[new] - own[old], count).astype(np.float64)
        tree_place = np.full(int(forest.tree.max()) + 2, -1, dtype=np.int64)
        tree_place[trees] = np.arange(len(trees))
        # Of an edge one end may be held, whose tree is -1: its place is that of the other end.
        ends = tree_place[forest.tree[flat.ends]].max(axis=1)
        edges = np.flatnonzero(ends >= 0)
        before, after = flat.chosen(values)[edges], flat.chosen(proposed)[edges]
        more = self.entries[after] - self.entries[before]
        added = np.bincount(ends[edges], more, count).astype(np.float64)
        return trees, cost + added, priced + added

    def _spans(
        self, forest: Forest, values: Ints, proposed: Ints, changed: Ints, trees: Ints
    ) -> list[tuple[Ints, Ints, Ints]]:
        """Return for each tree the spans that change: first and end row, and bytes more."""
        compact = self.compact
        pieces = []
        place = np.searchsorted(trees, forest.tree[changed])
        for sign, strategies in ((-1, values), (1, proposed)):
            column = compact.first[changed] + strategies[changed]
            lengths = self._span_first[column + 1] - self._span_first[column]
            spans = self._span_order[ragged(self._span_first[column], lengths)]
            pieces.append(
                np.stack(
                    [
                        np.repeat(place, lengths),
                        compact.held_first[spans],
                        compact.held_end[spans],
                        sign * compact.held_bytes[spans],
                    ]
                )
            )
        every = np.concatenate(pieces, axis=1)
        every = every[:, np.argsort(every[0], kind="stable")]
        ends = np.searchsorted(every[0], np.arange(len(trees) + 1)).tolist()
        return [(every[1, a:b], every[2, a:b], every[3, a:b]) for a, b in pairwise(ends)]

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


class _Room:
    """The memory that changes of trees may take.

    Args:
        excess: Bytes of each row above its capacity.
        spans: Of each tree the spans that change: first and end row, and bytes more.

    Attributes:
        taken: The trees that were taken.
    """

    def __init__(self, excess: Ints, spans: list[tuple[Ints, Ints, Ints]]) -> None:
        self.excess = excess.copy()
        self.most = np.maximum(excess, 0)
        self.spans = spans
        self.taken: set[int] = set()

    def takes(self, tree: int) -> bool:
        """Take the change of a tree if no row gets farther above its capacity than it was."""
        fits = self._change(tree, 1)
        if fits:
            self.taken.add(tree)
        return fits

    def returns(self, tree: int) -> bool:
        """Take a change back, on the same condition."""
        fits = self._change(tree, -1)
        if fits:
            self.taken.discard(tree)
        return fits

    def _change(self, tree: int, sign: int) -> bool:
        first, end, more = self.spans[tree]
        if not len(first):
            return True
        low, high = int(first.min()), int(end.max())
        change = np.zeros(high - low + 1, dtype=np.int64)
        np.add.at(change, first - low, sign * more)
        np.subtract.at(change, end - low, sign * more)
        level = np.cumsum(change)[:-1]
        after = self.excess[low:high] + level
        if ((after > self.most[low:high]) & (level > 0)).any():
            return False
        self.excess[low:high] = after
        return True


def _with(values: Ints, proposed: Ints, changed: Ints) -> Ints:
    """Return the values with some of the proposed ones."""
    result = values.copy()
    result[changed] = proposed[changed]
    return result
