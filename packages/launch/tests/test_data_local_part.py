"""What each process loads of a batch: all processes together what one device takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from held_batches import LAYOUTS, Noting, layout, source_of
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.boxing import bounds_of
from sbp_core.compile import PhysicalPlan
from sbp_core.runtime import batch_parts, batch_slots
from sbp_launch.data import BatchLoader, DataCursor, LocalPart, SampleOrder

NAMES = st.sampled_from(sorted(LAYOUTS))


def ranks_of(plan: PhysicalPlan) -> list[int]:
    return [part.rank for part in plan.ranks]


@pytest.mark.slow
@given(NAMES, st.integers(0, 7), st.integers(1, 3))
def test_a_process_cuts_what_its_rank_holds_of_the_batch_of_one_device(
    name: str, size: int, count: int
) -> None:
    plan = layout(name, size, count)
    whole = {"x": torch.randn(count * size, 2), "y": torch.randn(count * size)}

    for rank in ranks_of(plan):
        part = LocalPart(plan, [rank])
        found = part.slice_rows({name: value[part.rows] for name, value in whole.items()})
        wanted = {
            name: whole[name][[sample for span in own.samples for sample in span]]
            for name, own in batch_parts(plan, [rank]).items()
        }
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@given(NAMES, st.integers(1, 7), st.integers(1, 3))
def test_processes_load_what_their_ranks_read_and_nothing_else(
    name: str, size: int, count: int
) -> None:
    plan = layout(name, size, count)
    slots = batch_slots(plan)

    for rank in ranks_of(plan):
        read = {
            index * size + row
            for tensor in ("x", "y")
            for bounds in [bounds_of(*_tensor(plan, slots, tensor))]
            if rank in bounds
            for row in range(*bounds[rank][0])
            for index in range(count)
        }
        assert LocalPart(plan, [rank]).rows.tolist() == sorted(read)


def _tensor(plan: PhysicalPlan, slots, name: str):
    slot = slots[name]
    return slot.shape, plan.stages[slot.stage], slot.sbp


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_process_with_all_ranks_loads_the_batch_whole(name: str) -> None:
    plan = layout(name, 4, 2)

    part = LocalPart(plan, ranks_of(plan))

    assert part.rows.tolist() == list(range(8))


#: Whether a rank reads a sample twice over the ranks: these split the batch over all of theirs.
SPLIT_OVER_ALL = ("one rank", "data", "data on four", "both axes")


@pytest.mark.slow
@given(
    st.integers(1, 60),
    st.integers(0, 2**40),
    st.lists(
        st.tuples(NAMES, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3)),
        min_size=1,
        max_size=5,
    ),
)
def test_across_changes_of_mesh_and_batch_size_each_sample_is_used_once_an_epoch(
    num_samples: int, seed: int, legs: list[tuple[str, int, int, int]]
) -> None:
    """A run that stops and goes on with other ranks, batch and micro-batches, again and again."""
    order = SampleOrder(num_samples=num_samples, seed=seed)
    cursor = DataCursor(order=order)
    used: list[int] = []

    while cursor.epoch < 1 or legs:
        name, size, count, steps = legs.pop() if legs else ("data", 3, 1, 1)
        plan, batch_size = layout(name, size, count), size * count
        asked = []
        for rank in ranks_of(plan):  # each is a process of its own, which knows the cursor alone
            data = Noting(num_samples)
            kept = DataCursor.from_json(cursor.to_json())
            part = LocalPart(plan, [rank])
            with BatchLoader(source_of(data), "train", kept, batch_size, part) as loader:
                taken = [loader.next() for _ in range(steps)]
            asked.append(data.asked or [[]] * steps)
        for step in range(steps):
            assert taken[step].begin == cursor
            wanted = order.numbers(cursor.position + np.arange(batch_size)).tolist()
            cursor = cursor.advanced(batch_size)
            loaded = [number for own in asked for number in own[step]]
            assert set(loaded) == set(wanted)
            if name in SPLIT_OVER_ALL:
                assert sorted(loaded) == sorted(wanted)
            used += wanted

    for epoch in range(len(used) // num_samples):
        assert sorted(used[epoch * num_samples :][:num_samples]) == list(range(num_samples))


def test_a_tensor_that_the_data_do_not_give_is_left_to_the_session() -> None:
    part = LocalPart(layout("data", 4, 1), [1])

    assert part.slice_rows({"x": torch.zeros(2, 2)}).keys() == {"x"}
