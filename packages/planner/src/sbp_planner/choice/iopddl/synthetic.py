r"""Make random choice problems shaped like a training step of a transformer, to test the solver.

They are like the problems of the IOPDDL contest: each node gets a strategy at least cost.

    a layer     x --> norm --> up --> act --> down --> add -->      forward, top to bottom
                 \______________________________________/           the residual edge
                           w_up             w_down                  parameters live all the time
    backward    mirrored; each node has an edge to its forward node, which lives until then

A strategy is a split of a tensor over the two axes of a mesh, of some kinds by axis, so nodes have
up to `kinds`² strategies. An edge costs the bytes that differ between two splits; pointwise nodes
follow their inputs. Layers are equal but for noise. A hidden assignment is allowed and fits, so
every problem has a solution; `slack` sets the distance of the limit to the least possible memory.

The problems have the structure, not the figures, of any machine or model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_planner.choice.problem import ChoiceProblem, Floats, Ints, evaluate

#: The nodes of a layer, the index of their input within the layer (-1: the input of the layer),
#: whether they are pointwise, and the size of their tensor in units of a batch row.
_LAYER = (
    ("norm", (-1,), True, 1),
    ("up", (0, 6), False, 4),
    ("act", (1,), True, 4),
    ("down", (2, 7), False, 1),
    ("add", (3, -1), True, 1),
)


@dataclass(slots=True)
class _Draft:
    random: np.random.Generator
    kinds: int
    forbidden: float
    noise: float
    costs: list[Floats] = field(default_factory=list)
    usages: list[Ints] = field(default_factory=list)
    intervals: list[list[int]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    tables: list[Floats] = field(default_factory=list)
    split: list[Ints] = field(default_factory=list)  # for each node its splits, (strategies, 2)
    size: list[int] = field(default_factory=list)  # for each node the bytes of its tensor

    def node(self, size: int, time: int) -> int:
        """Add a node: some of the splits of a tensor of so many bytes."""
        axis = np.arange(self.kinds)
        every = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
        kept = self.random.random(len(every)) < 0.8
        kept[0] = True
        split = every[kept]
        shards = np.where(split > 0, 4, 1).prod(axis=1)
        work = self.random.integers(0, 1000, len(split)) + size // shards // 256
        self.costs.append(work.astype(np.float64))
        self.usages.append((size // shards).astype(np.int64))
        self.intervals.append([time, time + 2])
        self.split.append(split)
        self.size.append(size)
        return len(self.costs) - 1

    def edge(self, u: int, v: int, pointwise: bool, *, all_allowed: bool = False) -> None:
        """Add an edge: the cost of converting the splits of u into splits of v."""
        random = self.random
        differ = (self.split[u][:, None] != self.split[v][None, :]).sum(axis=2)
        table = differ * (self.size[u] / 1024.0)
        if not pointwise:
            table = table + random.integers(0, 4, table.shape) * (self.size[u] / 4096.0)
        table = np.round(table * np.exp(self.noise * random.standard_normal(table.shape)))
        forbidden = 0.0 if all_allowed else self.forbidden
        table[random.random(table.shape) < forbidden] = np.inf
        self.edges.append((u, v))
        self.tables.append(table)

    def limited(self, slack: float, name: str) -> ChoiceProblem:
        """Return the problem, with a limit and pairs such that a hidden assignment is allowed."""
        # The hidden assignment holds few bytes, but not the fewest everywhere.
        hidden = [
            int(np.argmin(usage * np.exp(0.5 * self.random.standard_normal(len(usage)))))
            for usage in self.usages
        ]
        for (u, v), table in zip(self.edges, self.tables, strict=True):
            if table[hidden[u], hidden[v]] == np.inf:
                table[hidden[u], hidden[v]] = self.size[u] / 512.0
        free = ChoiceProblem(
            costs=self.costs,
            usages=self.usages,
            intervals=[(start, end) for start, end in self.intervals],
            edges=self.edges,
            edge_costs=self.tables,
            name=name,
        )
        least = evaluate(free, hidden).peak_usage
        most = evaluate(free, [int(usage.argmax()) for usage in self.usages]).peak_usage
        return replace(free, usage_limit=least + int(slack * (most - least)))


def transformer_problem(
    layers: int,
    *,
    seed: int = 0,
    kinds: int = 3,
    forbidden: float = 0.2,
    slack: float = 0.1,
    noise: float = 0.05,
) -> ChoiceProblem:
    """Return a random problem; it has about 14 nodes a layer.

    Args:
        layers: Number of layers, >= 1.
        seed: Seed of the random numbers.
        kinds: Number of splits along an axis, >= 1; the first is replication.
        forbidden: Part of the pairs of strategies that is forbidden, in [0, 1).
        slack: The limit, from 0, the need of the hidden assignment, to 1, the need of any.
        noise: Relative standard deviation of costs between equal layers.
    """
    if layers < 1 or kinds < 1 or not 0 <= forbidden < 1 or slack < 0 or noise < 0:
        raise SbpValueError(
            f"{layers=}, {kinds=}, {forbidden=}, {slack=}, {noise=}",
            accepted="layers and kinds >= 1, forbidden in [0, 1), slack and noise >= 0",
        )
    draft = _Draft(np.random.default_rng(seed), kinds, forbidden, noise)
    forward = [draft.node(1 << 20, 0)]
    parameters: list[tuple[int, int]] = []
    for _ in range(layers):
        weights = draft.node(1 << 22, 0), draft.node(1 << 22, 0)
        base = forward[-1]
        inside: list[int] = []
        for time, (_, sources, pointwise, size) in enumerate(_LAYER, len(forward)):
            node = draft.node(size << 20, time)
            read = [weights[s - 6] if s >= 6 else base if s < 0 else inside[s] for s in sources]
            for source in read:
                draft.edge(source, node, pointwise)
            inside.append(node)
            forward.append(node)
        parameters += [(w, n) for w, n in zip(weights, (inside[1], inside[3]), strict=True)]
    end = 2 * len(forward) + 1
    before = forward[-1]
    by_node = {node: weight for weight, node in parameters}
    for place in reversed(range(1, len(forward))):
        time = 2 * len(forward) - place
        own = forward[place]
        node = draft.node(draft.size[own], time)
        draft.edge(before, node, _LAYER[(place - 1) % 5][2])
        draft.edge(own, node, False)
        draft.intervals[own][1] = time + 1
        draft.intervals[before][1] = max(draft.intervals[before][1], time + 1)
        if own in by_node:
            gradient = draft.node(draft.size[by_node[own]], time)
            draft.edge(node, gradient, False)
            draft.edge(by_node[own], gradient, True, all_allowed=True)
            draft.intervals[gradient][1] = end
            draft.intervals[by_node[own]][1] = end
        before = node
    return draft.limited(slack, f"transformer of {layers} layers, seed {seed}")
