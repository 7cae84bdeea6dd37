"""PipeDream's released optimizer, as a yardstick: what it would cut, on the same graph and machine.

Written from a description of what msr-fiddle/pipedream, optimizer/optimizer_graph_hierarchical.py
does, faults included: states are ancestor closures from the first source; sync is added to compute,
with 4 (m - 1) / m bytes for each of the parameters; transfers are charged to the receiving stage.
"""

from math import inf

import numpy as np

from sbp_planner.stages import Stage
from sbp_planner.stages.ideals import _closed_ideals


def released_stages(graph, levels, *, straight=False, transfers=True):
    """Return (its time, its stages)."""
    masks = sorted(_closed_ideals(graph, 100_000), key=lambda mask: (mask.bit_count(), mask))
    states = [0, *masks]  # a segment (i, j) is states[j] without states[i]
    size = len(states)
    blocks = graph.blocks

    def total(mask, attribute):
        own = (getattr(blocks[at], attribute) for at in range(len(blocks)) if mask >> at & 1)
        return sum(own)

    compute = np.array([total(mask, "compute_s") for mask in states])
    weights = np.array([total(mask, "parameter_bytes") for mask in states])
    out = np.array([_frontier_bytes(graph, mask) for mask in states])
    end = np.where(np.arange(size) < size - 1, out, 0)
    below = [[i < j and not states[i] & ~states[j] for j in range(size)] for i in range(size)]
    inside = np.where(below, compute[None, :] - compute[:, None], inf)
    own = weights[None, :] - weights[:, None]
    chosen, width = [], 1
    for level in levels:
        count, rate = level.components, level.bytes_per_s
        table = np.full((count + 1, size, size), inf)
        choice = {}
        for m in range(1, count + 1):
            if m == 1 or not straight:
                table[m] = (inside + 4 * (m - 1) * own / (rate * m) / width) / m
            for r in range(1, 2 if straight else m):
                last = (inside + 4 * (r - 1) * own / (rate * r)) / r
                if transfers:
                    last = np.maximum(last, 2 * np.maximum(out[:, None], end) / (rate * r))
                for i in range(size - 2):
                    times = np.maximum(table[m - r, i, 1:, None], last[1:])  # split at k > 0
                    best = times.argmin(axis=0)
                    for j in np.flatnonzero(times.min(axis=0) < table[m, i]):
                        table[m, i, j] = times[best[j], j]
                        choice[m, i, j] = int(best[j]) + 1, r
        chosen.append(choice)
        inside, width = table[count], count
    found = []
    _unfold(graph, states, levels, chosen, len(levels) - 1, (0, size - 1), (), (), found)
    return inside[0, size - 1], found


def _unfold(graph, states, levels, chosen, level, segment, replicas, numbers, found):
    start, end = segment
    if level < 0:
        names = graph.names(states[end] & ~states[start])
        found.append(Stage(blocks=names, replicas=replicas, segment=numbers))
        return
    parts, left = [], levels[level].components
    while (left, start, end) in chosen[level]:
        k, r = chosen[level][left, start, end]
        parts.append((k, end, r))
        end, left = k, left - r
    parts.append((start, end, left))
    for first, last, count in reversed(parts):
        number = found[-1].segment[level] + 1 if found else 0
        _unfold(
            graph,
            states,
            levels,
            chosen,
            level - 1,
            (first, last),
            (count, *replicas),
            (number, *numbers),
            found,
        )


def _frontier_bytes(graph, mask):
    """Return what it takes for the bytes at a cut: more than cross, where branches end inside."""
    if not mask:
        return 0
    inside = [at for at in range(len(graph.blocks)) if mask >> at & 1]
    made = {flow.producer: flow.num_bytes for flow in graph.flows}
    frontier = {at for at in inside if not any(mask >> s & 1 for s in graph.successors[at])}
    counted = set(frontier)
    for end in frontier:
        closure = graph.ancestors[end]
        for before in range(len(graph.blocks)):
            users = graph.successors[before]
            if closure >> before & 1 and any(u != end and not closure >> u & 1 for u in users):
                counted.add(before)
    return sum(made.get(graph.blocks[at].name, 0) for at in counted)
