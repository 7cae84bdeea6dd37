"""The messages of a transfer, counted at once, are the sums of its pieces."""

from __future__ import annotations

from collections import Counter

import pytest

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.boxing.price import transfer_messages
from sbp_core.boxing.slices import can_transfer, transfer_pieces
from sbp_core.placement import Placement
from sbp_core.sbp import all_nd_sbps

EVEN, UNEVEN, SHORT = (24, 24), (5, 7), (1, 3)

#: A mesh, and itself; the same ranks in another order or shape; some, others, fewer, more ranks.
PAIRS = [
    (Placement.grid((3,)), Placement.grid((3,))),
    (Placement.grid((2, 2)), Placement.grid((2, 2))),
    (Placement.grid((2, 2)), Placement([[3, 1], [2, 0]])),
    (Placement.grid((2, 3)), Placement.grid((3, 2))),
    (Placement.grid((2, 2)), Placement([2, 3, 7])),
    (Placement.grid((2, 2)), Placement([[4, 5], [6, 7]])),
    (Placement.grid((2, 2, 2)), Placement([6, 1])),
    (Placement([1]), Placement.grid((2, 2))),
]


@pytest.mark.parametrize("shape", [EVEN, UNEVEN, SHORT])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_messages_are_the_sums_of_the_pieces_between_two_ranks(
    before: Placement, after: Placement, shape: tuple[int, ...]
) -> None:
    checked = 0
    pairs = [
        (source, target)
        for source in all_nd_sbps(len(shape), before.num_axes, ("sum", "max"))
        for target in all_nd_sbps(len(shape), after.num_axes, ("sum", "max"))
        if can_transfer(source, target)
    ]
    for source, target in pairs[:: max(1, len(pairs) // 150)]:
        step = BoxingStep(
            kind=StepKind.TRANSFER,
            shape=shape,
            dtype="float32",
            source=(before, source),
            target=(after, target),
            axes=(),
            size_bytes=0,
        )
        expected: Counter[tuple[int, int]] = Counter()
        for piece in transfer_pieces(step):
            if piece.sender != piece.receiver:
                expected[piece.sender, piece.receiver] += piece.size_bytes

        found = transfer_messages(step)

        assert {
            (sender, receiver): found[i, j]
            for i, sender in enumerate(before.rank_list)
            for j, receiver in enumerate(after.rank_list)
            if found[i, j]
        } == expected
        checked += len(expected) > 0
    assert checked > 5


def test_a_scalar_is_sent_whole() -> None:
    step = BoxingStep(
        kind=StepKind.TRANSFER,
        shape=(),
        dtype="float64",
        source=(Placement([0]), next(iter(all_nd_sbps(0, 1)))),
        target=(Placement([0, 1]), next(iter(all_nd_sbps(0, 1)))),
        axes=(),
        size_bytes=0,
    )

    assert transfer_messages(step).tolist() == [[0, 8]]
