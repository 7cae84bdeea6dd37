"""`RemainingProblem`: a reduced choice problem that maps its solutions to the original problem.

`solver` and `large_search` search it, and offer its assignments to the record of the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from sbp_planner.choice.compact import Mask, compacted
from sbp_planner.choice.incumbent import Record
from sbp_planner.choice.problem import Ints
from sbp_planner.choice.reduce import reduce_further
from sbp_planner.choice.reduced_graph import Graph


class RemainingProblem:
    """Maps assignments between the reduced and the original problem."""

    def __init__(self, graph: Graph, record: Record) -> None:
        self.graph = graph
        self.record = record
        self.compact, self.nodes = compacted(graph)
        self.num_pairs = self.compact.num_arcs

    def offer(self, values: Ints) -> None:
        """Offer an assignment of this part to the record, if it may be better."""
        compact = self.compact
        if compact.total(values) < self.record.cost and compact.fits(values):
            chosen = dict(zip(self.nodes, values.tolist(), strict=True))
            self.record.offer(self.graph.extend(chosen))

    def projected(self, assignment: Sequence[int] | None) -> Ints | None:
        """Return an assignment on what is left, if all its strategies are left and fit."""
        values = {} if assignment is None else self.graph.project(assignment)
        if any(node not in values for node in self.nodes):
            return None
        found = np.array([values[node] for node in self.nodes], dtype=np.int64)
        allowed = self.compact.total(found) < inf and self.compact.fits(found)
        return found if allowed else None

    def pruned(
        self, strategies: list[Mask], pairs: list[Mask], deadline: float
    ) -> RemainingProblem:
        """Return the part with some strategies and pairs only.

        Raises:
            NothingAllowedError: If nothing is allowed any more.
        """
        by_node = dict(zip(self.nodes, strategies, strict=True))
        edges = ((self.nodes[u], self.nodes[v]) for u, v in self.compact.edges)
        by_edge = dict(zip(edges, pairs, strict=True))
        return RemainingProblem(reduce_further(self.graph, by_node, by_edge, deadline), self.record)
