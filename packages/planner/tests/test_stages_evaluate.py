import pytest

from sbp_core.errors import SbpValueError
from sbp_planner.stages import (
    AtomicBlock,
    BlockGraph,
    Flow,
    MachineLevel,
    Stage,
    WeightVersions,
    chain,
    data_parallel,
    evaluate,
)

GRAPH = chain(
    [
        AtomicBlock(
            name=name, forward_s=seconds, backward_s=seconds, activation_bytes=10, parameter_bytes=6
        )
        for name, seconds in (("a", 6.0), ("b", 2.0), ("c", 1.0))
    ],
    [4, 2],
)
MACHINE = (MachineLevel(components=2, bytes_per_s=2.0), MachineLevel(components=3, bytes_per_s=1.0))


def stage(blocks, replicas, segment):
    return Stage(blocks=tuple(blocks), replicas=replicas, segment=segment)


#: Two of three components are replicas of the first stage; the third is a pipeline of two.
NESTED = [stage("a", (2, 2), (0, 0)), stage("b", (1, 1), (1, 1)), stage("c", (1, 1), (2, 1))]


def test_a_stage_is_priced_level_by_level():
    first, second, third = evaluate(GRAPH, MACHINE, NESTED).stages

    assert (first.compute_s, second.compute_s, third.compute_s) == (12.0, 4.0, 2.0)
    # In a component 2 * 1/2 * 6 bytes at 2 B/s; between two, 2 * 1/2 * 6 at 1 B/s for each two.
    assert first.sync_s == max(3.0, 2 * 6.0)
    assert (second.sync_s, third.sync_s) == (0.0, 0.0)


def test_a_transfer_goes_over_the_links_of_the_level_that_it_crosses():
    first, second, third = evaluate(GRAPH, MACHINE, NESTED).stages

    # Two components send to one: its link counts. Then from device to device of a component.
    assert (first.boundary_bytes, first.transfer_s) == (4, 2 * 4 / 1.0)
    assert (second.boundary_bytes, second.transfer_s) == (2, 2 * 2 / 2.0)
    assert (third.boundary_bytes, third.transfer_s) == (0, 0.0)


def test_the_slowest_stage_or_transfer_is_the_time():
    found = evaluate(GRAPH, MACHINE, NESTED)

    assert found.pipeline_s == max(12 / 4, 8.0, 4.0, 2.0)


def test_micro_batches_in_flight_are_those_of_all_devices_behind():
    first, second, third = evaluate(GRAPH, MACHINE, NESTED).stages

    # ceil(6 / 4), 2 / 1, 1 / 1; the released optimizer charges one less of each.
    assert [price.in_flight for price in (first, second, third)] == [2, 2, 1]
    assert [price.memory_bytes for price in (first, second, third)] == [32, 32, 16]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (WeightVersions.STASHED, [3 * 16, 2 * 16, 16]),
        (WeightVersions.DOUBLE, [3 * 10 + 2 * 6, 2 * 16, 16]),
        (WeightVersions.SINGLE, [3 * 10 + 6, 2 * 10 + 6, 16]),
    ],
)
def test_versions_of_parameters_are_as_many_as_the_schedule_keeps(versions, expected):
    straight = [stage(name, (1,), (at,)) for at, name in enumerate("abc")]

    found = evaluate(GRAPH, (MachineLevel(components=3, bytes_per_s=1.0),), straight, versions)

    assert [price.memory_bytes for price in found.stages] == expected


def test_a_replicated_pipeline_takes_as_many_micro_batches_at_a_time():
    # Each of three components holds the pipeline a | b, c; its gradients are summed over three.
    stages = [stage("a", (1, 3), (0, 0)), stage("bc", (1, 3), (1, 0))]

    found = evaluate(GRAPH, MACHINE, stages)

    # 2 * 2/3 * (6 + 12) bytes at 1 B/s for each three micro-batches.
    assert [price.sync_s for price in found.stages] == [24.0, 24.0]
    assert found.stages[0].transfer_s == pytest.approx(2 * 4 / 2.0 / 3)
    assert [price.in_flight for price in found.stages] == [2, 1]
    assert found.pipeline_s == 24.0 / 3


def test_data_parallelism_is_one_stage_on_all_devices():
    found = data_parallel(GRAPH, MACHINE)

    # max(max(18, 2 * 1/2 * 18 / 2) / 2, 2 * 2/3 * 18 / 1) / 3
    assert found.pipeline_s == pytest.approx(24.0 / 3)
    assert found.memory_bytes == 3 * 16


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([stage("ab", (2, 3), (0, 0))], "'c'"),
        ([stage("abcd", (2, 3), (0, 0))], "'d'"),
        ([stage("abca", (2, 3), (0, 0))], "twice"),
        ([stage("bc", (2, 2), (0, 0)), stage("a", (2, 1), (1, 1))], "later stage"),
        ([stage("abc", (2, 2), (0, 0))], "of 3"),
        ([stage("abc", (1, 3), (0, 0))], "of 2"),
        ([stage("ab", (1, 3), (0, 0)), stage("c", (1, 2), (1, 0))], "level 1"),
        ([stage("ab", (2, 2), (0, 0)), stage("c", (2, 1), (2, 1))], "follow"),
    ],
)
def test_stages_that_are_no_pipeline_are_refused(stages, said):
    with pytest.raises(SbpValueError, match=said):
        evaluate(GRAPH, MACHINE, stages)


def test_what_one_block_sends_to_two_stages_crosses_both_boundaries():
    blocks = tuple(AtomicBlock(name=name) for name in "abc")
    flows = (Flow(producer="a", consumers=("b", "c"), num_bytes=3),)
    straight = [stage(name, (1,), (at,)) for at, name in enumerate("abc")]

    found = evaluate(
        BlockGraph(blocks=blocks, flows=flows),
        (MachineLevel(components=3, bytes_per_s=1.0),),
        straight,
    )

    assert [price.boundary_bytes for price in found.stages] == [3, 3, 0]
