"""Random choice problems to test and time the solver; each has a known assignment that fits.

A choice problem gives each node a strategy at the least cost, within a memory limit at all times.

    edges       a chain, and from each node some more to nodes before it: near ones (`reach`), any
                ones (random graphs of large treewidth), or the mirrored one (skips of a U-Net)
    memory      a node lives until its last reader or longer, like values for a backward pass
    ballast     nodes of one strategy that fill the room between the limit and the memory of the
                planted assignment, so that memory is as tight at every time as at the peak

Usually, the more ways a strategy splits, the fewer bytes, and the higher the cost. An edge costs
nothing between equal splits. The problems have the structure, not the figures, of any model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_planner.choice.problem import ChoiceProblem, evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parameters of a random problem.

    Args:
        nodes: Number of nodes, >= 1, without ballast.
        degree: Edges of a node to nodes before it, on average, >= 0; the chain is the first.
        reach: How far back such an edge goes, at most; 0: to any node.
        mirrored: Part of the nodes of the second half that read their mirrored node, in [0, 1].
        strategies: Number of strategies of a node, on average, >= 1.
        single: Part of the nodes with one strategy, in [0, 1].
        forbidden: Part of the pairs that is forbidden, in [0, 1).
        held: Part of the nodes that live until their mirrored node, in [0, 1].
        slack: The limit, from 0, the need of the planted assignment, to 1, the need of any.
        frugal: Part of the nodes whose planted strategy has the fewest bytes, in [0, 1]; of other
            nodes it is random.
        ballast: Part of the room at each time that ballast fills, in [0, 1].
    """

    nodes: int
    degree: float = 1.4
    reach: int = 0
    mirrored: float = 0.0
    strategies: int = 8
    single: float = 0.1
    forbidden: float = 0.3
    held: float = 0.1
    slack: float = 0.02
    frugal: float = 0.9
    ballast: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.mirrored, self.single, self.held, self.frugal, self.ballast)
        if (
            self.nodes < 1
            or self.strategies < 1
            or min(self.degree, self.reach, self.slack) < 0
            or not 0 <= self.forbidden < 1
            or not all(0 <= part <= 1 for part in parts)
        ):
            raise SbpValueError(
                f"{self}", accepted="nodes and strategies >= 1, parts from 0 to 1, the rest >= 0"
            )


#: Structures by name; the name states the difficulty.
FAMILIES: dict[str, Shape] = {
    "random": Shape(nodes=2000, degree=2.0),
    "dense": Shape(nodes=1000, degree=6.0, reach=60, forbidden=0.05, slack=0.01),
    "skips": Shape(nodes=4000, degree=1.2, reach=20, mirrored=0.5, held=0.3, slack=0.005),
    "wide": Shape(nodes=300, degree=1.6, reach=40, strategies=120, slack=0.01),
    "forbidden": Shape(nodes=2000, degree=2.0, forbidden=0.65, strategies=12),
    "long": Shape(nodes=3000, degree=1.3, reach=100, held=0.9, slack=0.001),
    "tight": Shape(nodes=1000, reach=50, degree=1.5, held=0.3, slack=0.0, ballast=1.0),
}


def planted_problem(shape: Shape, seed: int = 0) -> tuple[ChoiceProblem, list[int]]:
    """Return a random problem, and an assignment that it allows (optimal only by chance)."""
    random = np.random.default_rng(seed)
    count = shape.nodes
    sizes = np.where(
        random.random(count) < shape.single,
        1,
        1 + random.poisson(max(shape.strategies - 1, 0), count),
    )
    bytes_of = (2.0 ** random.uniform(10, 20, count)).astype(np.int64)
    splits = [random.integers(0, 8, size) for size in sizes]
    usages = [
        (int(held) >> (own // 2)) + random.integers(0, 1 + int(held) // 16, len(own))
        for own, held in zip(splits, bytes_of, strict=True)
    ]
    costs = []
    for own, held in zip(usages, bytes_of.tolist(), strict=True):
        # A finer split has more to send.
        dear = (held - np.minimum(own, held)) * random.uniform(0, 2, len(own))
        costs.append(np.round((dear + random.uniform(0, 0.2 * held, len(own))) / 64))
    planted = [
        int(own.argmin() if random.random() < shape.frugal else random.integers(len(own)))
        for own in usages
    ]
    edges = _edges(random, shape)
    tables = []
    for u, v in edges:
        ours, theirs = splits[u][:, None], splits[v][None, :]
        differ = (ours // 2 != theirs // 2) + 0.5 * (ours % 2 != theirs % 2)
        held = int(min(bytes_of[u], bytes_of[v]))
        table = np.round(differ * held * random.uniform(0.5, 1.5, differ.shape) / 64)
        allowed = table[planted[u], planted[v]]
        table[random.random(table.shape) < shape.forbidden] = inf
        table[planted[u], planted[v]] = allowed
        tables.append(table)
    problem = ChoiceProblem(
        costs=costs,
        usages=usages,
        intervals=_intervals(random, shape, edges),
        edges=edges,
        edge_costs=tables,
        name=f"{shape}, seed {seed}",
    )
    return _limited(problem, planted, shape)


def _edges(random: np.random.Generator, shape: Shape) -> list[tuple[int, int]]:
    found: dict[tuple[int, int], None] = {}
    for node in range(1, shape.nodes):
        if shape.degree > 0:
            found[node - 1, node] = None
        for _ in range(random.poisson(max(shape.degree - 1, 0))):
            back = min(shape.reach or node, node)
            found[node - 1 - int(random.integers(back)), node] = None
        mirror = shape.nodes - 1 - node
        if mirror < node and random.random() < shape.mirrored:
            found[mirror, node] = None
    return list(found)


def _intervals(
    random: np.random.Generator, shape: Shape, edges: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    ends = [node + 2 for node in range(shape.nodes)]
    for u, v in edges:
        # A value with a distant reader is usually recomputed, or read from elsewhere.
        if v - u < 64 or random.random() < shape.held:
            ends[u] = max(ends[u], v + 1)
    for node in range(shape.nodes):
        if random.random() < shape.held:
            ends[node] = max(ends[node], shape.nodes - node)
    return list(enumerate(ends))


def _limited(
    problem: ChoiceProblem, planted: list[int], shape: Shape
) -> tuple[ChoiceProblem, list[int]]:
    """Set the limit, and fill the room below it with ballast."""
    assert problem.usages is not None and problem.intervals is not None
    least = evaluate(problem, planted).peak_usage
    most = evaluate(problem, [int(own.argmax()) for own in problem.usages]).peak_usage
    limit = least + int(shape.slack * (most - least))
    change = np.zeros(max(end for _, end in problem.intervals) + 1, dtype=np.int64)
    for own, s, (start, end) in zip(problem.usages, planted, problem.intervals, strict=True):
        change[start] += own[s]
        change[end] -= own[s]
    room = (shape.ballast * (least - np.cumsum(change)[:-1])).astype(np.int64).tolist()
    full = [(time, held) for time, held in enumerate(room) if held > 0]
    filled = replace(
        problem,
        costs=[*problem.costs, *(np.zeros(1) for _ in full)],
        usages=[*problem.usages, *(np.array([held]) for _, held in full)],
        intervals=[*problem.intervals, *((time, time + 1) for time, _ in full)],
        usage_limit=limit,
    )
    return filled, [*planted, *(0 for _ in full)]
