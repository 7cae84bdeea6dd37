from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graphs import chains_of_ideals, compositions, graphs, machines

from sbp_core.errors import SbpValueError
from sbp_planner.stages import AtomicBlock, MachineLevel, chain
from sbp_planner.stages.flushed import FlushedProblem, cut_flushed
from sbp_planner.stages.table import InFlightLimits


def step_s(problem, blocks, devices):
    """Return the time of a step of given stages, and the most memory of a device, device by device.

    Every device has an address: its number in the component of each level.
    """
    levels, m = problem.levels, problem.micro_batches
    graph, sizes = problem.graph, [1]
    for level in levels:
        sizes.append(sizes[-1] * level.components)
    own = {block.name: block for block in graph.blocks}
    times, memory, first, done = [], 0, 0, set()
    ranges = []
    for count in devices:
        ranges.append(range(first, first + count))
        first += count
    for at, (names, used) in enumerate(zip(blocks, ranges, strict=True)):
        done.update(names)
        compute = sum(own[name].compute_s for name in names) / len(used)
        parameters = sum(own[name].parameter_bytes for name in names)
        sync = 0
        for k, level in enumerate(levels):
            groups = {}
            for device in used:
                groups.setdefault(device // sizes[k + 1], set()).add(device // sizes[k])
            q = max(len(group) for group in groups.values())
            sync = max(sync, 2 * (q - 1) / q * parameters / level.bytes_per_s)
        times.append(max(compute, sync / m))
        held = m if problem.in_flight is InFlightLimits.ALL else min(m, len(blocks) - at)
        activations = sum(own[name].activation_bytes for name in names)
        memory = max(memory, parameters + held * activations / len(used))
        if at + 1 < len(blocks):
            mask = sum(1 << graph.index[name] for name in done)
            k = max(
                k
                for k in range(len(levels))
                if used[-1] // sizes[k] != ranges[at + 1][0] // sizes[k]
            )
            links = min(len({d // sizes[k] for d in side}) for side in (used, ranges[at + 1]))
            times.append(2 * graph.crossing_bytes(mask) / (levels[k].bytes_per_s * links))
    return (m - 1) * max(times) + sum(times), memory


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    graphs(max_blocks=4),
    machines([(1,), (3,), (2, 2), (3, 2), (2, 1, 2)]),
    st.integers(1, 5),
    st.sampled_from([InFlightLimits.STAGES, InFlightLimits.ALL]),
    st.sampled_from([inf, 12, 25]),
    st.none() | st.integers(1, 3),
)
def test_no_flushed_pipeline_is_faster(graph, levels, m, in_flight, memory_bytes, num_stages):
    problem = FlushedProblem(
        graph=graph,
        levels=levels,
        micro_batches=m,
        in_flight=in_flight,
        memory_bytes=memory_bytes,
        num_stages=num_stages,
    )
    total = 1
    for level in levels:
        total *= level.components
    found = [
        step_s(problem, blocks, devices)
        for blocks in chains_of_ideals(graph)
        if len(blocks) <= total and num_stages in (None, len(blocks))
        for devices in compositions(total, len(blocks))
    ]
    expected = min((time for time, memory in found if memory <= memory_bytes), default=inf)

    plan = cut_flushed(problem)

    if expected == inf:
        assert plan is None
    else:
        assert plan.step_s == pytest.approx(expected)
        stages = [stage.blocks for stage in plan.stages], [s.devices for s in plan.stages]
        assert step_s(problem, *stages)[0] == pytest.approx(expected)


BLOCKS = [AtomicBlock(name=str(at), forward_s=1.0, activation_bytes=6) for at in range(4)]


def test_1f1b_fits_where_gpipe_does_not():
    problem = {
        "graph": chain(BLOCKS, [0, 0, 0]),
        "levels": (MachineLevel(components=2, bytes_per_s=1.0),),
        "micro_batches": 8,
        "num_stages": 2,
        "memory_bytes": 24,
    }

    assert cut_flushed(FlushedProblem(**problem)) is not None
    assert cut_flushed(FlushedProblem(**problem, in_flight=InFlightLimits.ALL)) is None


def test_a_stage_may_end_in_the_middle_of_a_node():
    # 3 of 4 devices on two nodes of two; PipeDream's recurrence knows only whole nodes.
    blocks = [
        AtomicBlock(name="front", forward_s=3.0),
        AtomicBlock(name="end", parameter_bytes=1000),
    ]
    machine = tuple(MachineLevel(components=2, bytes_per_s=1.0) for _ in range(2))

    plan = cut_flushed(FlushedProblem(graph=chain(blocks, [0]), levels=machine, micro_batches=100))

    assert [stage.devices for stage in plan.stages] == [3, 1]


def test_problems_that_cannot_be_are_refused():
    graph = chain(BLOCKS, [0, 0, 0])

    with pytest.raises(SbpValueError, match="levels"):
        FlushedProblem(graph=graph, levels=(), micro_batches=1)
    with pytest.raises(SbpValueError, match="share"):
        FlushedProblem(
            graph=graph,
            levels=(MachineLevel(components=2, bytes_per_s=1.0),),
            micro_batches=1,
            in_flight=InFlightLimits.ROUND_ROBIN,
        )
