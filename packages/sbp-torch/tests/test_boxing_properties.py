"""Any conversion of any tensor between any placements: right on every rank, priced to the byte."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.boxing import BoxingStep, Route, StepKind, route
from sbp_core.boxing.price import step_time_s, transfer_messages
from sbp_core.boxing.slices import (
    collective_bytes,
    is_realisable,
    sent_bytes,
    transfer_bytes,
    transfer_pieces,
    uniform_bytes,
)
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, all_entries
from sbp_torch.boxing.execute import apply_step, assemble, local_step, shard
from sbp_torch.testing.boxing import BoxingCase, logical_tensor, source_shards

thorough = settings(derandomize=True, deadline=None, max_examples=300)
quick = settings(derandomize=True, deadline=None, max_examples=120)

State = tuple[Placement, NdSbp]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """A mesh of one to three axes and at most eight ranks, out of ten, in any order."""
    shape = draw(
        st.sampled_from(
            [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (3, 2), (2, 3), (2, 2, 2), (2, 1, 3)]
        )
    )
    size = Placement.grid(shape).size
    ranks = draw(st.one_of(st.just(range(10)), st.permutations(range(10))))
    flat = iter(ranks[:size])

    def build(extents: tuple[int, ...]) -> object:
        return next(flat) if not extents else [build(extents[1:]) for _ in range(extents[0])]

    return Placement(build(shape))  # type: ignore[arg-type]


def nd_sbps(
    placement: Placement, num_dims: int, reductions: tuple[str, ...]
) -> st.SearchStrategy[NdSbp]:
    choices = all_entries(num_dims, reductions)
    entries = st.lists(
        st.sampled_from(choices), min_size=placement.num_axes, max_size=placement.num_axes
    )
    return entries.map(lambda chosen: NdSbp(*chosen))


@st.composite
def cases(
    draw: st.DrawFn,
    largest: int = 7,
    reductions: tuple[str, ...] = ("sum", "sum", "max", "min"),
) -> BoxingCase:
    """A conversion; half of them stay on one placement."""
    shape = tuple(draw(st.lists(st.integers(0, largest), max_size=3)))
    before = draw(placements())
    after = before if draw(st.booleans()) else draw(placements())
    return BoxingCase(
        shape=shape,
        dtype=draw(st.sampled_from(["float64", "int64", "float32", "bfloat16"])),
        source=(before, draw(nd_sbps(before, len(shape), reductions))),
        target=(after, draw(nd_sbps(after, len(shape), reductions))),
    )


def run(found: Route, shards: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    for step in found.steps:
        shards = apply_step(step, shards)
    return shards


@pytest.mark.slow
@thorough
@given(cases())
def test_a_route_brings_every_rank_its_part_of_the_tensor(case: BoxingCase) -> None:
    logical, before = logical_tensor(case), source_shards(case)
    kept = {rank: part.clone() for rank, part in before.items()}
    placement, sbp = case.target

    after = run(case.route, before)

    assert list(after) == list(placement.rank_list) or not case.route.steps
    expected = shard(logical, placement, sbp)
    for rank in placement.rank_list:
        assert after[rank].shape == expected[rank].shape
        assert after[rank].dtype == expected[rank].dtype
        if not sbp.has_partial:
            assert torch.equal(after[rank], expected[rank])
    assert torch.equal(assemble(after, placement, sbp, case.shape, check=True), logical)
    assert all(torch.equal(before[rank], kept[rank]) for rank in before), "inputs were changed"


@pytest.mark.slow
@quick
@given(cases())
def test_a_route_of_few_bytes_between_placements_is_as_right(case: BoxingCase) -> None:
    found = route(case.shape, case.dtype, case.source, case.target, fewest_between=True)

    after = run(found, source_shards(case))

    assert found.bytes == case.route.bytes
    assert torch.equal(assemble(after, *case.target, case.shape), logical_tensor(case))


@pytest.mark.slow
@thorough
@given(cases())
def test_a_route_is_a_chain_from_source_to_target(case: BoxingCase) -> None:
    states = [case.source, *(step.target for step in case.route.steps)]

    assert states[-1] == case.target
    assert len(set(states)) == len(states), "a route visits no state twice"
    for state, step in zip(states, case.route.steps, strict=False):
        assert step.source == state
        changed = [
            axis
            for axis, (a, b) in enumerate(zip(step.source[1], step.target[1], strict=False))
            if a != b
        ]
        if step.kind is not StepKind.TRANSFER:
            assert step.source[0] == step.target[0]
            assert set(changed) <= set(step.axes)


@pytest.mark.slow
@thorough
@given(cases())
def test_the_bytes_that_ranks_send_add_up_to_those_of_each_step(case: BoxingCase) -> None:
    ranks = {*case.source[0].rank_list, *case.target[0].rank_list}

    for step in case.route.steps:
        assert sum(sent_bytes(step, rank) for rank in ranks) == step.size_bytes
        if step.kind is StepKind.TRANSFER:
            pieces = transfer_pieces(step)
            moved = [piece.size_bytes for piece in pieces if piece.sender != piece.receiver]
            assert sum(moved) == transfer_bytes(step) == step.size_bytes
            assert transfer_messages(step).sum() == step.size_bytes


@pytest.mark.slow
@quick
@given(cases(largest=2), st.integers(1, 3))
def test_the_steps_of_even_and_uneven_tensors_move_the_exact_count(
    case: BoxingCase, half: int
) -> None:
    even = tuple(extent * 24 * half for extent in case.shape)

    for shape in (case.shape, even):
        for step in route(shape, case.dtype, case.source, case.target).steps:
            if step.kind is StepKind.TRANSFER:
                assert step.size_bytes == transfer_bytes(step)
            else:
                assert is_realisable(step)
                assert step.size_bytes == collective_bytes(step)
                assert uniform_bytes(step) in (None, step.size_bytes)


@pytest.mark.slow
@quick
@given(cases(reductions=("sum",)), st.data())
def test_no_detour_over_slices_moves_fewer_bytes(case: BoxingCase, data: st.DataObject) -> None:
    placement = data.draw(st.sampled_from([case.source[0], case.target[0]]))
    middle = (placement, data.draw(nd_sbps(placement, len(case.shape), ())))

    first = route(case.shape, case.dtype, case.source, middle)
    second = route(case.shape, case.dtype, middle, case.target)

    assert case.route.bytes <= first.bytes + second.bytes


@pytest.mark.slow
@quick
@given(cases())
def test_local_steps_are_the_same_alone_and_together(case: BoxingCase) -> None:
    shards = source_shards(case)

    for step in case.route.steps:
        after = apply_step(step, shards)
        if step.kind is StepKind.LOCAL:
            for rank, part in shards.items():
                assert torch.equal(local_step(step, rank, part), after[rank])
        shards = after


@pytest.mark.slow
@quick
@given(cases())
def test_taking_apart_and_putting_together_gives_the_tensor(case: BoxingCase) -> None:
    logical = logical_tensor(case)

    for placement, sbp in (case.source, case.target):
        parts = shard(logical, placement, sbp)
        assert torch.equal(assemble(parts, placement, sbp, case.shape, check=True), logical)


@pytest.mark.slow
@quick
@given(cases())
def test_steps_take_time_exactly_when_ranks_take_part(case: BoxingCase) -> None:
    cluster = Cluster(
        name="test",
        num_devices=10,
        devices_per_node=3,
        device=Device(memory_bytes=1, flop_per_s={"float32": 1.0}, memory_bytes_per_s=1.0),
        intra_node=Link(latency_s=1e-6, bytes_per_s=1e10),
        inter_node=Link(latency_s=1e-5, bytes_per_s=1e9),
    )

    for step in case.route.steps:
        time_s = step_time_s(step, cluster)
        if step.size_bytes:
            assert time_s > 0
        if step.kind in (StepKind.LOCAL, StepKind.TRANSFER) and not step.size_bytes:
            assert time_s == 0


@pytest.mark.slow
@quick
@given(cases())
def test_routes_survive_pickling_and_print_a_line_a_step(case: BoxingCase) -> None:
    found = case.route

    restored = pickle.loads(pickle.dumps(found))

    assert restored == found
    assert hash(restored) == hash(found)
    assert len(str(found).splitlines()) == 1 + len(found.steps)
    assert all(isinstance(step, BoxingStep) for step in restored.steps)
