"""The parts of a batch: every sample is held, and parts say which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.runtime import batch_parts, local_samples
from sbp_core.sbp import B, NdSbp, S
from sbp_core.testing.plans import batch_plan

GRID = Placement([[0, 1], [2, 3]], ("data", "tensor"))


def test_a_part_is_the_slice_of_each_micro_batch() -> None:
    plan = batch_plan([GRID], {"x": (0, "S(0), B", (6, 3)), "one": (0, "B, B", ())}, count=2)

    parts = batch_parts(plan, [2])

    assert parts["x"].shape == (6, 3)
    assert parts["x"].samples == (range(3, 6), range(9, 12))
    assert str(parts["x"]) == "samples 3-5, 9-11 of 12"
    assert (parts["one"].shape, parts["one"].samples) == ((), ())
    assert batch_parts(plan, [0, 2])["x"].samples == (range(12),)
    assert str(batch_parts(plan, [0, 3])["x"]) == "all samples"


def test_an_uneven_part_is_balanced_and_may_be_empty() -> None:
    line = Placement([0, 1, 2], ("data",))

    five = batch_plan([line], {"x": (0, "S(0)", (5,))})
    two = batch_plan([line], {"x": (0, "S(0)", (2,))})

    assert [local_samples(five, [rank]) for rank in range(3)] == [
        (range(2),),
        (range(2, 4),),
        (range(4, 5),),
    ]
    assert local_samples(two, [2]) == ()
    assert batch_parts(two, [2])["x"].shape == (0,)


def test_ranks_of_a_stage_hold_what_the_stage_reads() -> None:
    stages = [Placement([0, 1], ("data",)), Placement([2, 3], ("data",)), Placement([4], ("data",))]
    plan = batch_plan(stages, {"x": (0, "S(0)", (4, 2)), "y": (1, "S(0)", (4,))})

    held = [list(batch_parts(plan, [rank])) for rank in range(5)]
    assert held == [["x"], ["x"], ["y"], ["y"], []]
    assert local_samples(plan, [1]) == local_samples(plan, [3]) == (range(2, 4),)
    assert local_samples(plan, [4]) == ()


def test_tensors_that_are_whole_do_not_count_beside_those_that_are_split() -> None:
    tensors = {"mask": (0, "B, B", (9,)), "x": (0, "S(0), S(1)", (4, 2))}

    assert local_samples(batch_plan([GRID], tensors), [1]) == (range(2),)


def test_tensors_that_are_split_differently_have_no_common_samples() -> None:
    plan = batch_plan([GRID], {"x": (0, "S(0), B", (4,)), "y": (0, "B, S(0)", (4,))})

    said = "of 'x' and of 'y': samples 0-1 of 4, and samples 2-3"
    with pytest.raises(SbpValueError, match=said):
        local_samples(plan, [1])


@given(st.integers(1, 4), st.integers(0, 9), st.sampled_from(["S(0), B", "B, S(0)", "S(0), S(0)"]))
def test_the_parts_of_all_ranks_are_the_batch(count: int, size: int, sbp: str) -> None:
    plan = batch_plan([GRID], {"x": (0, sbp, (size, 2))}, count)

    held = {
        rank: [sample for span in local_samples(plan, [rank]) for sample in span]
        for rank in GRID.rank_list
    }

    times = 4 // len({tuple(samples) for samples in held.values()}) if size > 3 else None
    samples = sorted(sample for found in held.values() for sample in found)
    assert set(samples) == set(range(count * size))
    if times:
        assert samples == sorted(list(range(count * size)) * times)
    for rank, found in held.items():
        assert found == sorted(found)
        assert batch_parts(plan, [rank])["x"].shape == (len(found), 2)
    assert local_samples(plan, GRID.rank_list) == ((range(count * size),) if size else ())


def test_a_split_of_another_dim_leaves_all_samples() -> None:
    plan = batch_plan([GRID], {"x": (0, str(NdSbp(S(1), B)), (4, 6))})

    assert batch_parts(plan, [0])["x"].shape == (4, 6)
    assert batch_parts(plan, [0])["x"].is_whole
