from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graphs import best_of_all, graphs, machines

from sbp_core.errors import SbpValueError
from sbp_planner.stages import (
    AtomicBlock,
    BlockGraph,
    Flow,
    HierarchyProblem,
    Infeasible,
    MachineLevel,
    WeightVersions,
    chain,
    cut_hierarchy,
    evaluate,
    order_ideals,
)
from sbp_planner.stages.hierarchy import _Search

FLAT = [(1,), (2,), (3,), (4,), (5,)]
NESTED = [(2, 2), (1, 3), (3, 1), (2, 1, 2), (1, 2, 2), (3, 2), (2, 3)]


def check_against_all(graph, levels, memory_bytes, replicate, versions):
    expected, least = best_of_all(
        graph, levels, memory_bytes, replicate=replicate, versions=versions
    )

    plan = cut_hierarchy(
        HierarchyProblem(
            graph=graph,
            levels=levels,
            memory_bytes=memory_bytes,
            replicate=replicate,
            versions=versions,
        )
    )

    if expected == float("inf"):
        assert isinstance(plan, Infeasible)
        wanted = None if least == float("inf") else pytest.approx(least)
        assert plan.least_memory_bytes == wanted
    else:
        assert evaluate(graph, levels, plan.stages, versions) == plan.evaluation
        assert plan.evaluation.pipeline_s == pytest.approx(expected, rel=1e-9)
        assert memory_bytes is None or plan.evaluation.memory_bytes <= memory_bytes
        assert plan.complete
        assert plan.bound_s == plan.evaluation.pipeline_s


limits = st.none() | st.integers(1, 60)
versions = st.sampled_from(WeightVersions)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(graphs(), machines(FLAT), limits, st.booleans(), versions)
def test_on_one_level_no_pipeline_is_faster(graph, levels, limit, replicate, kept):
    check_against_all(graph, levels, limit, replicate, kept)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(graphs(max_blocks=4), machines(NESTED), limits, st.booleans(), versions)
def test_on_several_levels_no_pipeline_is_faster(graph, levels, limit, replicate, kept):
    check_against_all(graph, levels, limit, replicate, kept)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(graphs(max_blocks=4), machines([(3, 1), (4, 1), (3, 2)]))
def test_what_the_search_minimises_is_what_the_pipeline_costs(graph, levels):
    # Inside components the search takes transfers from tables, which only the price refutes.
    found = cut_hierarchy(HierarchyProblem(graph=graph, levels=levels))

    price = evaluate(graph, levels, found.stages).pipeline_s
    assert found.searched_s == pytest.approx(price, rel=1e-9)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs(), machines([(4,), (2, 2), (3, 2), (2, 2, 2)]), st.floats(0.2, 3), limits)
def test_a_search_within_a_bound_finds_the_best_or_nothing(graph, levels, share, limit):
    problem = HierarchyProblem(graph=graph, levels=levels, memory_bytes=limit)
    ideals = order_ideals(graph, 100)
    best = _Search(problem, ideals).best()
    bound = share * (best or 1.0)

    found = _Search(problem, ideals, bound=bound).best()

    assert found == (best if best is not None and best <= bound * (1 + 1e-9) else None)


@pytest.mark.exhaustive
@settings(max_examples=1000, deadline=None)
@given(graphs(max_blocks=6), machines(FLAT + NESTED), limits, st.booleans(), versions)
def test_no_pipeline_is_faster_on_more_graphs(graph, levels, limit, replicate, kept):
    check_against_all(graph, levels, limit, replicate, kept)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(graphs(max_blocks=4), machines([(3,), (2, 2)]), st.none() | st.integers(5, 40))
def test_with_idle_devices_the_best_smaller_machine_is_used(graph, levels, limit):
    counts = product(*(range(1, level.components + 1) for level in levels))
    smaller = [
        tuple(
            MachineLevel(components=n, bytes_per_s=level.bytes_per_s)
            for n, level in zip(own, levels, strict=True)
        )
        for own in counts
    ]
    expected = min(best_of_all(graph, own, limit)[0] for own in smaller)

    plan = cut_hierarchy(
        HierarchyProblem(graph=graph, levels=levels, memory_bytes=limit, idle=True)
    )

    if expected == float("inf"):
        assert isinstance(plan, Infeasible)
    else:
        assert plan.levels in smaller
        assert plan.evaluation.pipeline_s == pytest.approx(expected, rel=1e-9)


def layers(seconds, activation_bytes=0, parameter_bytes=0):
    return [
        AtomicBlock(
            name=f"layer{at}",
            forward_s=own,
            activation_bytes=activation_bytes,
            parameter_bytes=parameter_bytes,
        )
        for at, own in enumerate(seconds)
    ]


def flat(count, bytes_per_s=1.0):
    return (MachineLevel(components=count, bytes_per_s=bytes_per_s),)


def test_a_heavy_front_with_small_parameters_is_replicated_and_a_light_end_is_not():
    # The shape of VGG-16: convolutions compute, the classifier has the parameters.
    blocks = [
        AtomicBlock(name="convolutions", forward_s=3.0, parameter_bytes=1),
        AtomicBlock(name="classifier", forward_s=1.0, parameter_bytes=100),
    ]

    plan = cut_hierarchy(HierarchyProblem(graph=chain(blocks, [0]), levels=flat(4)))

    assert [stage.num_replicas for stage in plan.stages] == [3, 1]
    assert plan.evaluation.pipeline_s == 1.0


def test_data_parallelism_does_not_fit_because_nothing_is_behind_it():
    # The released optimizer charges the micro-batches in flight minus one: here, none.
    graph = chain(layers([1.0, 1.0], activation_bytes=10), [0])

    plan = cut_hierarchy(HierarchyProblem(graph=graph, levels=flat(2), memory_bytes=9))

    assert isinstance(plan, Infeasible)
    # Two stages hold two micro-batches of the first layer; one stage holds one of both.
    assert plan.least_memory_bytes == 20
    assert "20 B" in plan.reason


def test_too_few_places_to_cut_for_straight_stages_is_an_answer():
    graph = chain(layers([1.0, 1.0]), [0])

    plan = cut_hierarchy(HierarchyProblem(graph=graph, levels=flat(3), replicate=False))

    assert isinstance(plan, Infeasible)
    assert plan.least_memory_bytes is None
    assert "3 devices" in plan.reason


def test_a_transfer_is_shared_by_the_replicas_of_the_side_with_fewer():
    blocks = layers([2.0, 2.0])
    machine = (MachineLevel(components=4, bytes_per_s=1.0),)

    plan = cut_hierarchy(HierarchyProblem(graph=chain(blocks, [0.75]), levels=machine))

    # As 2 + 2, two links carry 2 * 0.75 bytes of each micro-batch.
    assert [stage.num_replicas for stage in plan.stages] in ([4], [2, 2])
    assert plan.evaluation.pipeline_s == 1.0


def test_a_value_that_two_later_blocks_use_is_sent_once():
    blocks = layers([1.0, 1.0, 1.0])
    flows = (
        Flow(producer="layer0", consumers=("layer1", "layer2"), num_bytes=5),
        Flow(producer="layer1", consumers=("layer2",), num_bytes=1),
    )
    graph = BlockGraph(blocks=tuple(blocks), flows=flows)

    plan = cut_hierarchy(
        HierarchyProblem(graph=graph, levels=flat(3, bytes_per_s=100.0), replicate=False)
    )

    assert [price.boundary_bytes for price in plan.evaluation.stages] == [5, 6, 0]


def wide(branches, length, *, source=True):
    """A source (or none), branches and a sink: (length + 1) ** branches + 2 (or 1) ideals."""
    blocks = [AtomicBlock(name="source", forward_s=1.0), AtomicBlock(name="sink", forward_s=1.0)]
    flows = [
        Flow(
            producer="source",
            consumers=tuple(f"b{branch}.0" for branch in range(branches)),
            num_bytes=1,
        )
    ]
    for branch in range(branches):
        for at in range(length):
            name, after = f"b{branch}.{at}", f"b{branch}.{at + 1}"
            blocks.append(AtomicBlock(name=name, forward_s=1.0 + branch % 3, parameter_bytes=1))
            flows.append(
                Flow(producer=name, consumers=(after if at + 1 < length else "sink",), num_bytes=1)
            )
    return BlockGraph(
        blocks=tuple(blocks if source else blocks[1:]),
        flows=tuple(flows if source else flows[1:]),
    )


def test_a_graph_too_wide_for_all_its_ideals_is_cut_along_some_and_says_so():
    graph = wide(branches=8, length=4)
    total = sum(block.compute_s for block in graph.blocks)

    plan = cut_hierarchy(HierarchyProblem(graph=graph, levels=flat(6, 1e9), max_ideals=400))

    assert not plan.complete
    assert "bytes crossing" in plan.family
    assert plan.bound_s == pytest.approx(total / 6)
    assert plan.bound_s <= plan.evaluation.pipeline_s <= 1.2 * plan.bound_s


def test_with_some_ideals_a_pipeline_is_never_faster_than_with_all():
    graph = wide(branches=3, length=3, source=False)
    levels = flat(4, 10.0)

    some = cut_hierarchy(
        HierarchyProblem(graph=graph, levels=levels, replicate=False, max_ideals=20)
    )
    every = cut_hierarchy(HierarchyProblem(graph=graph, levels=levels, replicate=False))

    assert every.num_ideals == 4**3 + 1
    assert some.num_ideals < every.num_ideals
    assert every.evaluation.pipeline_s <= some.evaluation.pipeline_s


@pytest.mark.parametrize("changes", [{"levels": ()}, {"memory_bytes": 0}])
def test_problems_that_cannot_be_are_refused(changes):
    graph = chain(layers([1.0]), [])

    with pytest.raises(SbpValueError):
        HierarchyProblem(**{"graph": graph, "levels": flat(1), **changes})


@pytest.mark.parametrize("changes", [{"components": 0}, {"bytes_per_s": 0.0}])
def test_levels_that_cannot_be_are_refused(changes):
    with pytest.raises(SbpValueError):
        MachineLevel(**{"components": 2, "bytes_per_s": 1.0, **changes})
