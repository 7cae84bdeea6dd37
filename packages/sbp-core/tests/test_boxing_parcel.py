"""Parcels: what ranks send each other makes the shards that the step itself makes."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.boxing.execute import apply_step, combine, shard
from sbp_core.boxing.parcel import num_elements, pack, unpack
from sbp_core.boxing.router import route
from sbp_core.boxing.slices import collective_pieces, transfer_pieces
from sbp_core.boxing.step import Step, StepKind
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, S, Sbp, all_entries

SBPS = st.sampled_from(all_entries(2))
SHAPES = st.tuples(st.integers(0, 7), st.integers(1, 5))
RANKS = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)


def exchange(step: Step, rank: int, shards: dict[int, torch.Tensor]) -> torch.Tensor:
    """Make the shard of one receiver from parcels, as a transport would."""
    every = (
        transfer_pieces(step)
        if step.kind is StepKind.TRANSFER
        else collective_pieces(step, step.group(rank))
    )
    mine = [piece for piece in every if piece.receiver == rank]
    parcels: dict[int, torch.Tensor] = {}
    for sender in {piece.sender for piece in mine}:
        pieces = [piece for piece in mine if piece.sender == sender]
        parcels[sender] = pack(shards[sender], pieces)
        assert parcels[sender].shape == (num_elements(step, pieces),)
    return combine(step, rank, unpack(mine, parcels))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(shape=SHAPES, sources=RANKS, targets=RANKS, before=SBPS, after=SBPS)
def test_parcels_make_the_shards_that_the_step_itself_makes(
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


def test_no_pieces_make_an_empty_parcel_of_the_shard_s_dtype() -> None:
    parcel = pack(torch.ones(2, 3, dtype=torch.int16), [])

    assert parcel.shape == (0,) and parcel.dtype == torch.int16


def test_a_parcel_of_one_column_is_contiguous() -> None:
    mesh = Placement([0, 1], ("x",))
    ends = (mesh, NdSbp(S(0))), (mesh, NdSbp(S(1)))
    (step,) = route((4, 2), "float32", *ends).steps
    (piece,) = [p for p in collective_pieces(step, (0, 1)) if (p.sender, p.receiver) == (0, 1)]

    parcel = pack(torch.arange(4.0).reshape(2, 2), [piece])

    assert parcel.is_contiguous() and parcel.tolist() == [1.0, 3.0]
