r"""Random choice problems in the shape of those of the IOPDDL contest: a step of a transformer.

    a layer     x --> norm --> up --> act --> down --> add -->      forward, top to bottom
                 \______________________________________/           the residual edge
                           w_up             w_down                  parameters live all the time
    backward    mirrored; each node has an edge to its forward node, which lives until then

A strategy is a split of a tensor over the two axes of a mesh, of some kinds by axis, so that nodes
have up to `kinds`² strategies. An edge costs by the bytes that differ between two splits; pointwise
nodes follow what they read. Layers are equal but for noise. A hidden assignment is allowed and
fits, so that every problem has a solution; the limit is as near to the least possible memory as is
asked for.

What is made has the structure, not the figures, of any machine or model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_planner.choice.problem import ChoiceProblem, Floats, Ints, evaluate

#: The nodes of a layer, the place of what each reads within the layer (-1: what comes in), whether
#: it is pointwise, and the size of its tensor in units of a batch row.
_LAYER = (
    ("norm", (-1,), True, 1),
    ("up", (0, 6), False, 4),
    ("act", (1,), True, 4),
    ("down", (2, 7), False, 1),
    ("add", (3, -1), True, 1),
)


@dataclass(slots=True)
class _Draft:
    costs: list[Floats] = field(default_factory=list)
    usages: list[Ints] = field(default_factory=list)
    intervals: list[list[int]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    tables: list[Floats] = field(default_factory=list)
    split: list[Ints] = field(default_factory=list)  # of each node its splits, (strategies, 2)
    size: list[int] = field(default_factory=list)  # of each node the bytes of its tensor


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
        seed: Of the random numbers.
        kinds: Splits by axis, >= 1; the first is replication.
        forbidden: Part of the pairs of strategies that is forbidden, in [0, 1).
        slack: Where the limit lies, from 0, what the hidden assignment needs, to 1, what any does.
        noise: Standard deviation of costs between equal layers, as a part.
    """
    if layers < 1 or kinds < 1 or not 0 <= forbidden < 1 or slack < 0 or noise < 0:
        raise SbpValueError(
            f"{layers=}, {kinds=}, {forbidden=}, {slack=}, {noise=}",
            accepted="layers and kinds >= 1, forbidden in [0, 1), slack and noise >= 0",
        )
    random = np.random.default_rng(seed)
    draft = _Draft()
    forward = [_node(draft, random, kinds, 1 << 20, 0)]
    parameters: list[tuple[int, int]] = []
    reads: list[tuple[int, ...]] = [()]
    for _ in range(layers):
        weights = (
            _node(draft, random, kinds, 1 << 22, 0),
            _node(draft, random, kinds, 1 << 22, 0),
        )
        base = forward[-1]
        inside: list[int] = []
        for time, (_, sources, pointwise, size) in enumerate(_LAYER, len(forward)):
            node = _node(draft, random, kinds, size << 20, time)
            read = [weights[s - 6] if s >= 6 else base if s < 0 else inside[s] for s in sources]
            for source in read:
                _edge(draft, random, source, node, forbidden, noise, pointwise)
            inside.append(node)
            forward.append(node)
            reads.append(tuple(read))
        parameters += [(w, n) for w, n in zip(weights, (inside[1], inside[3]), strict=True)]
    end = 2 * len(forward) + 1
    before = forward[-1]
    by_node = {node: weight for weight, node in parameters}
    for place in reversed(range(1, len(forward))):
        time = 2 * len(forward) - place
        own = forward[place]
        node = _node(draft, random, kinds, draft.size[own], time)
        _edge(draft, random, before, node, forbidden, noise, _LAYER[(place - 1) % 5][2])
        _edge(draft, random, own, node, forbidden, noise, False)
        draft.intervals[own][1] = time + 1
        draft.intervals[before][1] = max(draft.intervals[before][1], time + 1)
        if own in by_node:
            gradient = _node(draft, random, kinds, draft.size[by_node[own]], time)
            _edge(draft, random, node, gradient, forbidden, noise, False)
            _edge(draft, random, by_node[own], gradient, 0.0, noise, True)
            draft.intervals[gradient][1] = end
            draft.intervals[by_node[own]][1] = end
        before = node
    return _limited(draft, random, slack, f"transformer of {layers} layers, seed {seed}")


def _node(draft: _Draft, random: np.random.Generator, kinds: int, size: int, time: int) -> int:
    """Add a node: some of the splits, not all, of a tensor of so many bytes."""
    every = np.stack(np.meshgrid(np.arange(kinds), np.arange(kinds)), axis=-1).reshape(-1, 2)
    kept = random.random(len(every)) < 0.8
    kept[0] = True
    split = every[kept]
    shards = np.where(split > 0, 4, 1).prod(axis=1)
    work = random.integers(0, 1000, len(split)) + size // shards // 256
    draft.costs.append(work.astype(np.float64))
    draft.usages.append((size // shards).astype(np.int64))
    draft.intervals.append([time, time + 2])
    draft.split.append(split)
    draft.size.append(size)
    return len(draft.costs) - 1


def _edge(
    draft: _Draft,
    random: np.random.Generator,
    u: int,
    v: int,
    forbidden: float,
    noise: float,
    pointwise: bool,
) -> None:
    """Add an edge: what it costs to turn the splits of u into those of v."""
    differ = (draft.split[u][:, None] != draft.split[v][None, :]).sum(axis=2)
    table = differ * (draft.size[u] / 1024.0)
    if not pointwise:
        table = table + random.integers(0, 4, table.shape) * (draft.size[u] / 4096.0)
    table = np.round(table * np.exp(noise * random.standard_normal(table.shape)))
    table[random.random(table.shape) < forbidden] = np.inf
    draft.edges.append((u, v))
    draft.tables.append(table)


def _limited(draft: _Draft, random: np.random.Generator, slack: float, name: str) -> ChoiceProblem:
    """Return the problem, with a limit and pairs such that a hidden assignment is allowed."""
    # The hidden assignment holds few bytes, but not the fewest everywhere.
    hidden = [
        int(np.argmin(usage * np.exp(0.5 * random.standard_normal(len(usage)))))
        for usage in draft.usages
    ]
    for (u, v), table in zip(draft.edges, draft.tables, strict=True):
        if table[hidden[u], hidden[v]] == np.inf:
            table[hidden[u], hidden[v]] = draft.size[u] / 512.0
    free = ChoiceProblem(
        costs=draft.costs,
        usages=draft.usages,
        intervals=[(start, end) for start, end in draft.intervals],
        edges=draft.edges,
        edge_costs=draft.tables,
        name=name,
    )
    least = evaluate(free, hidden).peak_usage
    most = evaluate(free, [int(usage.argmax()) for usage in draft.usages]).peak_usage
    return ChoiceProblem(
        costs=free.costs,
        usages=free.usages,
        intervals=free.intervals,
        edges=free.edges,
        edge_costs=free.edge_costs,
        usage_limit=least + int(slack * (most - least)),
        name=name,
    )
