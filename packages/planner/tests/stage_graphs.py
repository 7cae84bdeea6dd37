"""Graphs to cut, drawn at random, and every pipeline of a small one."""

from functools import cache
from itertools import combinations, product
from math import inf

from hypothesis import strategies as st

from sbp_planner.stages import AtomicBlock, BlockGraph, Flow, MachineLevel, Stage, evaluate
from sbp_planner.stages.pipeline import WeightVersions


@st.composite
def graphs(draw, max_blocks=5):
    """Acyclic graphs with small whole costs, so that ties and zeros are common."""
    count = draw(st.integers(1, max_blocks))
    costs = st.integers(0, 6)
    blocks = tuple(
        AtomicBlock(
            name=f"n{at}",
            forward_s=draw(costs),
            backward_s=draw(costs),
            activation_bytes=draw(costs),
            parameter_bytes=draw(costs),
        )
        for at in range(count)
    )
    flows = []
    for at in range(count - 1):
        later = [f"n{other}" for other in range(at + 1, count)]
        consumers = draw(st.lists(st.sampled_from(later), unique=True, max_size=3))
        if consumers:
            flows.append(Flow(producer=f"n{at}", consumers=tuple(consumers), num_bytes=draw(costs)))
    # The order of the blocks in the graph must not matter.
    return BlockGraph(blocks=tuple(draw(st.permutations(blocks))), flows=tuple(flows))


@st.composite
def machines(draw, topologies):
    return tuple(
        MachineLevel(components=n, bytes_per_s=draw(st.sampled_from([0.5, 1.0, 4.0])))
        for n in draw(st.sampled_from(topologies))
    )


def chains_of_ideals(graph):
    """Yield every way to divide the blocks into consecutive non-empty stages, as lists of names."""
    names = [block.name for block in graph.blocks]
    for count in range(1, len(names) + 1):
        for stage_of in product(range(count), repeat=len(names)):
            own = dict(zip(names, stage_of, strict=True))
            if len(set(stage_of)) == count and all(
                own[flow.producer] <= own[user] for flow in graph.flows for user in flow.consumers
            ):
                yield [[name for name in names if own[name] == at] for at in range(count)]


@cache
def compositions(total, parts):
    """Return all tuples of so many positive numbers with that sum."""
    return [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))
        for cuts in combinations(range(1, total), parts - 1)
    ]


def placements(levels, count):
    """Yield (replicas, segments) of `count` stages on a machine, each innermost level first."""
    total = levels[-1].components
    if len(levels) == 1:
        for counts in compositions(total, count) if count <= total else ():
            yield [(n,) for n in counts], [(at,) for at in range(count)]
        return
    for groups in range(1, min(count, total) + 1):
        for outer in compositions(total, groups):
            for sizes in compositions(count, groups):
                inner = [list(placements(levels[:-1], size)) for size in sizes]
                for chosen in product(*inner):
                    replicas, segments = [], []
                    for at, (own, numbers) in enumerate(chosen):
                        base = [1 + number for number in segments[-1][:-1]] if segments else None
                        base = base or [0] * (len(levels) - 1)
                        for one, number in zip(own, numbers, strict=True):
                            replicas.append((*one, outer[at]))
                            moved = (b + n for b, n in zip(base, number, strict=True))
                            segments.append((*moved, at))
                    yield replicas, segments


def all_pipelines(graph, levels, *, replicate=True):
    """Yield all pipelines of a graph on a machine."""
    placed = {}
    for blocks in chains_of_ideals(graph):
        count = len(blocks)
        if count not in placed:
            placed[count] = list(placements(levels, count))
        for replicas, segments in placed[count]:
            if replicate or all(set(own) == {1} for own in replicas):
                yield [
                    Stage(blocks=tuple(names), replicas=own, segment=segment)
                    for names, own, segment in zip(blocks, replicas, segments, strict=True)
                ]


def best_of_all(
    graph, levels, memory_bytes=None, *, replicate=True, versions=WeightVersions.STASHED
):
    """Return the least time of the pipelines that fit, and the least memory of all of them."""
    time, memory = inf, inf
    for stages in all_pipelines(graph, levels, replicate=replicate):
        found = evaluate(graph, levels, stages, versions)
        memory = min(memory, found.memory_bytes)
        if memory_bytes is None or found.memory_bytes <= memory_bytes:
            time = min(time, found.pipeline_s)
    return time, memory
