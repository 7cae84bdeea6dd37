"""Packed buffers: what ranks send each other makes the shards that the step itself makes."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.boxing.manifest import manifest_of
from sbp_core.boxing.router import route
from sbp_core.boxing.slices import collective_pieces, is_realisable, transfer_pieces
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp, all_entries
from sbp_torch.boxing.execute import apply_step, combine, shard
from sbp_torch.boxing.processes.packed_buffer import PackedBuffers, num_elements, pack, unpack

SBPS = st.sampled_from(all_entries(2))
SHAPES = st.tuples(st.integers(0, 7), st.integers(1, 5))
RANKS = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)


def exchange(step: BoxingStep, rank: int, shards: dict[int, torch.Tensor]) -> torch.Tensor:
    """Make the shard of one receiver from buffers, as a transport would."""
    every = (
        transfer_pieces(step)
        if step.kind is StepKind.TRANSFER
        else collective_pieces(step, step.group(rank))
    )
    mine = [piece for piece in every if piece.receiver == rank]
    buffers: dict[int, torch.Tensor] = {}
    for sender in {piece.sender for piece in mine}:
        pieces = [piece for piece in mine if piece.sender == sender]
        buffers[sender] = pack(shards[sender], pieces)
        assert buffers[sender].shape == (num_elements(step, pieces),)
    return combine(step, rank, unpack(mine, buffers))


@pytest.mark.slow
@settings(derandomize=True, max_examples=150, deadline=None)
@given(shape=SHAPES, sources=RANKS, targets=RANKS, before=SBPS, after=SBPS)
def test_packed_buffers_make_the_shards_that_the_step_itself_makes(
    shape: tuple[int, int], sources: list[int], targets: list[int], before: Sbp, after: Sbp
) -> None:
    source = (Placement(sources, ("x",)), NdSbp(before))
    target = (Placement(targets, ("x",)), NdSbp(after))
    logical = torch.arange(1.0, prod(shape) + 1).reshape(shape)
    shards = shard(logical, *source)

    for step in route(shape, "float32", source, target).steps:
        expected = apply_step(step, shards)
        if step.kind not in (StepKind.LOCAL, StepKind.ALL_REDUCE):
            for rank in expected:
                assert torch.equal(exchange(step, rank, shards), expected[rank])
        shards = expected


def test_no_pieces_make_an_empty_packed_buffer_of_the_shard_s_dtype() -> None:
    buffer = pack(torch.ones(2, 3, dtype=torch.int16), [])

    assert buffer.shape == (0,) and buffer.dtype == torch.int16


def test_a_packed_buffer_of_one_column_is_contiguous() -> None:
    mesh = Placement([0, 1], ("x",))
    ends = (mesh, NdSbp(S(0))), (mesh, NdSbp(S(1)))
    (step,) = route((4, 2), "float32", *ends).steps
    (piece,) = [p for p in collective_pieces(step, (0, 1)) if (p.sender, p.receiver) == (0, 1)]

    buffer = pack(torch.arange(4.0).reshape(2, 2), [piece])

    assert buffer.is_contiguous() and buffer.tolist() == [1.0, 3.0]


def collectives(mesh: Placement, shape: tuple[int, ...]) -> st.SearchStrategy[BoxingStep]:
    """Any all-gather, reduce-scatter or all-to-all on one or several axes of a mesh."""
    entries = st.sampled_from([*all_entries(len(shape), ("sum", "max"))])
    axes = st.lists(
        st.integers(0, mesh.num_axes - 1), min_size=1, max_size=mesh.num_axes, unique=True
    )
    kinds = st.sampled_from([StepKind.ALL_GATHER, StepKind.REDUCE_SCATTER, StepKind.ALL_TO_ALL])
    splits, partials = st.sampled_from([S(0), S(1)]), st.sampled_from([P, P("max")])

    @st.composite
    def steps(draw: st.DrawFn) -> BoxingStep:
        kind, changed = draw(kinds), sorted(draw(axes))
        before = [draw(entries) for _ in range(mesh.num_axes)]
        after = list(before)
        reduction = draw(partials)
        for axis in changed:
            before[axis] = reduction if kind is StepKind.REDUCE_SCATTER else draw(splits)
            after[axis] = B if kind is StepKind.ALL_GATHER else draw(splits)
        return BoxingStep(
            kind=kind,
            shape=shape,
            dtype="int64",
            source=(mesh, NdSbp(*before)),
            target=(mesh, NdSbp(*after)),
            axes=tuple(changed),
            size_bytes=0,
        )

    return steps().filter(is_realisable)


@st.composite
def collective_cases(draw: st.DrawFn) -> BoxingStep:
    """A collective of even, uneven or too short parts, on one to three axes."""
    mesh = Placement.grid(draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2)])))
    sizes = st.integers(0, 9) | st.sampled_from([1, 8, 12])
    shape = tuple(draw(st.tuples(sizes, sizes, st.integers(1, 2))))[: draw(st.integers(2, 3))]
    return draw(collectives(mesh, shape))


def carry(step: BoxingStep, rank: int, buffers: dict[int, PackedBuffers]) -> None:
    """Move the chunks for one rank, as a transport would."""
    group = step.group(rank)
    place = group.index(rank)
    chunks = buffers[rank].received.split(list(buffers[rank].received_sizes))
    for sender, chunk in zip(group, chunks, strict=True):
        sent = buffers[sender].sent.split(list(buffers[sender].sent_sizes))
        assert sent[place].shape == chunk.shape, "both ends know the sizes"
        chunk.copy_(sent[place])


@pytest.mark.slow
@settings(derandomize=True, max_examples=400, deadline=None)
@given(collective_cases(), st.booleans(), st.booleans())
def test_what_is_not_packed_makes_the_same_shards_as_what_is(
    step: BoxingStep, with_own: bool, contiguous: bool
) -> None:
    placement, sbp = step.source
    logical = torch.arange(1, prod(step.shape) + 1).reshape(step.shape)
    shards = {rank: part * (rank + 1) for rank, part in shard(logical, placement, sbp).items()}
    if not contiguous:
        shards = {rank: part.mT.contiguous().mT for rank, part in shards.items()}
    kept = {rank: part.clone() for rank, part in shards.items()}
    expected = {}
    for group in placement.groups(*step.axes):
        for rank in group:
            pieces = [p for p in collective_pieces(step, group) if p.receiver == rank]
            taken = [(p, shards[p.sender][p.source_slices].clone()) for p in pieces]
            expected[rank] = combine(step, rank, taken)

    buffers = {
        rank: PackedBuffers(
            step,
            manifest_of(step, rank),
            part,
            device=torch.device("cpu"),
            with_own=with_own,
        )
        for rank, part in shards.items()
    }
    for rank in shards:
        buffers[rank].keep_own()
        carry(step, rank, buffers)
    results = {rank: buffers[rank].result() for rank in shards}

    for rank, part in results.items():
        assert torch.equal(part, expected[rank]) and part.is_contiguous()
        assert torch.equal(shards[rank], kept[rank]), "a shard was changed"
        assert part.untyped_storage().nbytes() == part.nbytes, "nothing else is kept alive"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 7), columns=st.integers(1, 5), dim=st.integers(0, 1), size=st.integers(2, 4)
)
def test_whole_shards_land_where_they_belong(rows: int, columns: int, dim: int, size: int) -> None:
    mesh = Placement.grid((size,))
    logical = torch.arange(rows * columns).reshape(rows, columns)
    step = BoxingStep(
        kind=StepKind.ALL_GATHER,
        shape=(rows, columns),
        dtype="int64",
        source=(mesh, NdSbp(S(dim))),
        target=(mesh, NdSbp(B)),
        axes=(0,),
        size_bytes=0,
    )
    shards = shard(logical, *step.source)

    for rank, part in shards.items():
        known = manifest_of(step, rank)
        buffers = PackedBuffers(step, known, part, device=torch.device("cpu"), whole=True)
        chunks = buffers.received.split(list(buffers.received_sizes))
        for sender, chunk in zip(mesh.rank_list, chunks, strict=True):
            if sender != rank:
                chunk.copy_(shards[sender].flatten())
        buffers.keep_own()

        assert known.gathers
        assert buffers.sent.shape == (part.numel(),)
        assert torch.equal(buffers.result(), logical)


def test_a_shard_that_lies_in_order_is_sent_and_received_without_copies() -> None:
    mesh = Placement.grid((2,))
    ends = (mesh, NdSbp(S(0))), (mesh, NdSbp(S(1)))
    (step,) = route((2, 2, 3), "int64", *ends).steps
    part = torch.arange(6).reshape(1, 2, 3)

    buffers = PackedBuffers(step, manifest_of(step, 0), part, device=torch.device("cpu"))

    assert buffers.sent.data_ptr() == part[0, 1].data_ptr()
    assert buffers.received.data_ptr() == buffers.result()[1].data_ptr()
    assert buffers.sent_sizes == buffers.received_sizes == (0, 3)
