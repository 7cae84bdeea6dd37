"""Small choice problems for tests, and their solution by trying everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
from hypothesis import strategies as st

from sbp_planner.choice import ChoiceProblem, evaluate


def brute_force(problem: ChoiceProblem) -> float:
    """Return the least cost of all assignments; `inf` if none is allowed and fits."""
    every = product(*(range(size) for size in problem.sizes))
    return min((evaluate(problem, assignment).cost for assignment in every), default=inf)


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 6, memory: bool = True) -> ChoiceProblem:
    """Draw a problem with parallel edges, self loops, ties, forbidden pairs and short lives."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, max_nodes))
    sizes = random.integers(1, 4, count)
    forbidden = draw(st.sampled_from([0.0, 0.2, 0.5]))

    def table(*shape: int) -> np.ndarray:
        entries = random.integers(-3, 10, shape).astype(float)
        entries[random.random(shape) < forbidden] = inf
        return entries

    num_edges = draw(st.integers(0, 2 * count))
    edges = [(int(u), int(v)) for u, v in random.integers(0, count, (num_edges, 2))]
    by_size = [np.flatnonzero(sizes == size).tolist() for size in (1, 2, 3)]
    ties = draw(st.booleans())
    problem = ChoiceProblem(
        costs=[table(size) for size in sizes],
        usages=[random.integers(0, 8, size) for size in sizes],
        intervals=[tuple(map(int, span)) for span in random.integers(0, 6, (count, 2))],
        edges=edges,
        edge_costs=[table(int(sizes[u]), int(sizes[v])) for u, v in edges],
        usage_limit=draw(st.integers(0, 6 * count)) if memory else None,
        ties=[nodes[: draw(st.integers(0, 3))] for nodes in by_size] if ties else [],
    )
    return problem if memory else replace(problem, usages=None)
