"""The tables of all steps hold what the definitions say of each step alone."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from boxing_oracle import single_steps

from sbp_core.boxing import StepKind
from sbp_core.boxing.memory import step_memory_bytes
from sbp_core.boxing.routing.collectives import KINDS
from sbp_core.boxing.routing.layout import BROADCAST, MAX, NEVER, SUM, Shared, Sizes, decode
from sbp_core.boxing.routing.step_tables import Mesh, Tables, tables
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

EVEN, UNEVEN, SHORT = (24, 24), (5, 7), (1, 3)

ENTRIES = (0, 1, BROADCAST, SUM, MAX)


def mesh_of(placement: Placement) -> Mesh:
    return placement.mesh_shape, (ENTRIES,) * placement.num_axes


def tables_of(shape: tuple[int, ...], before: Placement, after: Placement) -> Tables:
    shared: Shared = tuple(
        (before.rank_list.index(rank), after.rank_list.index(rank))
        for rank in before.rank_list
        if rank in after
    )
    other = None if before == after else mesh_of(after)
    return tables(mesh_of(before), other, () if other is None else shared, Sizes(shape, 0))


def check_pairs(
    shape: tuple[int, ...], before: Placement, after: Placement, *, every: int
) -> set[StepKind]:
    """Compare every so many pairs of states; return the kinds of steps that were met."""
    steps = tables_of(shape, before, after)
    block = steps.block(np.arange(steps.num_states))
    first = 0 if before == after else steps.num_source
    met: set[StepKind] = set()
    for at, (u, v) in enumerate(product(range(steps.num_source), range(first, steps.num_states))):
        if u == v or at % every:
            continue
        source = (before, NdSbp(*map(decode, steps.codes(u))))
        target = (after, NdSbp(*map(decode, steps.codes(v))))
        alone: tuple[int, ...] | None = None
        direct: int | None = None
        for step in single_steps(shape, "uint8", source, target):
            held = max(step_memory_bytes(step).values())
            met.add(step.kind)
            if step.kind is StepKind.TRANSFER:
                direct = step.size_bytes
                assert block.held_by_transfer[u, v] <= held
                assert steps.transfer_memory(u, v) == held
            elif alone is None:  # steps on fewer axes come first
                alone = (
                    step.size_bytes,
                    held,
                    KINDS.index(step.kind),
                    sum(1 << a for a in step.axes),
                )
        found = (block.moved[u, v], block.held[u, v], block.kind[u, v], block.axes[u, v])
        assert (alone or (NEVER,)) == found[: len(alone or (NEVER,))]
        assert (NEVER if direct is None else direct) == block.moved_by_transfer[u, v]
    return met


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN, SHORT])
@pytest.mark.parametrize(
    ("mesh", "every"), [((3,), 1), ((1, 2), 1), ((2, 2), 1), ((2, 3), 1), ((2, 2, 2), 41)]
)
def test_tables_of_a_mesh_hold_every_step(
    shape: tuple[int, ...], mesh: tuple[int, ...], every: int
) -> None:
    placement = Placement.grid(mesh)

    met = check_pairs(shape, placement, placement, every=every)

    assert met == set(StepKind)


@pytest.mark.parametrize("shape", [EVEN, UNEVEN, SHORT])
@pytest.mark.parametrize(
    ("before", "after", "every"),
    [
        (Placement.grid((2,)), Placement([2, 3]), 1),
        (Placement.grid((2,)), Placement([1, 2]), 1),
        (Placement.grid((2, 2)), Placement.grid((4,)), 1),
        (Placement.grid((2, 2)), Placement([[3, 1], [7, 0]]), 2),
        (Placement.grid((2, 3)), Placement.grid((3, 2)), 3),
        (Placement.grid((2, 2, 2)), Placement([[0, 2], [5, 9]]), 11),
    ],
)
def test_tables_of_two_meshes_hold_every_transfer_between_them(
    shape: tuple[int, ...], before: Placement, after: Placement, every: int
) -> None:
    assert check_pairs(shape, before, after, every=every) == {StepKind.TRANSFER}


@pytest.mark.parametrize("mesh", [(4,), (2, 3), (2, 2, 2)])
def test_one_table_serves_all_tensors_that_are_cut_evenly(mesh: tuple[int, ...]) -> None:
    placement = Placement.grid(mesh)
    size, states = placement.size, len(ENTRIES) ** len(mesh)
    shape = (size, 5 * size)
    exact = tables_of(shape, placement, placement)

    shares = tables(mesh_of(placement), None, (), Sizes((size, size), size * size))

    one, other = shares.block(np.arange(states)), exact.block(np.arange(states))
    for name in ("moved", "moved_by_transfer", "held"):
        of_one, of_other = getattr(one, name), getattr(other, name)
        assert np.array_equal(of_one == NEVER, of_other == NEVER)
        assert np.array_equal(of_one[of_one < NEVER] * 5, of_other[of_other < NEVER])
    for u, v in zip(*np.nonzero(other.moved_by_transfer < NEVER), strict=True):
        if (u + v) % 7 == 0:
            held = exact.transfer_memory(int(u), int(v))
            assert shares.transfer_memory(int(u), int(v)) * 5 == held
            assert one.held_by_transfer[u, v] * 5 <= held


def test_the_tables_of_a_model_with_many_uneven_tensors_are_all_kept() -> None:
    mesh = Placement.grid((2, 2, 2))
    shapes = [(3, extent) for extent in range(5, 17)]

    found = [tables_of(shape, mesh, mesh) for shape in shapes]

    again = [tables_of(shape, mesh, mesh) for shape in shapes]
    assert all(one is two for one, two in zip(found, again, strict=True))
