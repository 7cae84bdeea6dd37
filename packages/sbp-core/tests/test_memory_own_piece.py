"""What a rank keeps of its own in a boxing step is what the list of all pieces says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.boxing import StepKind, route
from sbp_core.boxing.slices import Bounds, collective_pieces, transfer_pieces
from sbp_core.boxing.step import BoxingStep
from sbp_core.memory.storages import own_piece
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Sbp, parse_sbp

_GRID = Placement.grid((2, 3), ("data", "tensor"))
_OTHERS = (_GRID, Placement.grid((3, 2), ("x", "y")), Placement([[6, 7], [8, 9]], ("x", "y")))

_ENTRIES: st.SearchStrategy[Sbp] = st.sampled_from(["S(0)", "S(1)", "B", "P"]).map(parse_sbp)


def _of_all_pieces(step: BoxingStep, rank: int) -> Bounds | None:
    """Look at all pieces of the rank's group."""
    is_transfer = step.kind is StepKind.TRANSFER
    pieces = transfer_pieces(step) if is_transfer else collective_pieces(step, step.group(rank))
    mine = [piece for piece in pieces if piece.receiver == rank]
    return mine[0].source if len(mine) == 1 and mine[0].sender == rank else None


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(_ENTRIES, _ENTRIES),
    st.tuples(_ENTRIES, _ENTRIES),
    st.sampled_from(_OTHERS),
    st.tuples(st.integers(0, 7), st.integers(1, 7)),
)
def test_a_rank_keeps_a_piece_if_it_is_all_that_it_has_after_the_step(
    source: tuple[Sbp, Sbp], target: tuple[Sbp, Sbp], after: Placement, shape: tuple[int, int]
) -> None:
    states = (_GRID, NdSbp(*source)), (after, NdSbp(*target))

    for step in route(shape, "float32", *states).steps:
        if step.kind in (StepKind.ALL_REDUCE, StepKind.LOCAL):
            continue
        for rank in {*step.source[0].rank_list, *step.target[0].rank_list}:
            assert own_piece(step, rank) == _of_all_pieces(step, rank)
