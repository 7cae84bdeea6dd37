"""The router against the oracle: no sequence of steps is better, by any of the criteria."""

from __future__ import annotations

from itertools import product

import pytest
from boxing_oracle import Oracle, price

from sbp_core.boxing import route
from sbp_core.placement import Placement

ALL = ("sum", "max", "min")


def disagreements(
    shape: tuple[int, ...],
    placements: list[Placement],
    reductions: tuple[str, ...] = ALL,
    *,
    four_suffice: bool = True,
) -> list[str]:
    """Return the routes from the first placement to the last that are not the best.

    Args:
        shape: Of the tensor.
        placements: One or two.
        reductions: Those of the partials.
        four_suffice: Whether four steps are to be enough for the fewest bytes. On three axes with
            several reductions, more of them are better now and then.
    """
    oracle = Oracle.of(shape, "float32", placements, reductions)
    wrong: list[str] = []
    for i, source in enumerate(oracle.states):
        for j, target in enumerate(oracle.states):
            if i != j and source[0] == placements[0] and target[0] == placements[-1]:
                found = route(shape, "float32", source, target)
                best, of_four = oracle.best(source, target), int(oracle.bytes_of_four[i, j])
                if (four_suffice and found.bytes != of_four) or found.bytes > of_four:
                    wrong.append(f"{found.bytes} bytes are not {of_four}, of four steps\n{found}")
                if price(found) != best:
                    wrong.append(f"{price(found)} is not {best}\n{found}")
    return wrong


def grid(*mesh_shape: int) -> Placement:
    return Placement.grid(mesh_shape)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mesh", [(3,), (2, 1), (2, 2)])
@pytest.mark.parametrize("shape", [(12, 12), (5, 3)])
def test_no_sequence_of_steps_on_a_mesh_is_better(
    mesh: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    assert disagreements(shape, [grid(*mesh)]) == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("shape", "reductions"), [((16,), ("sum",)), ((9,), ("sum", "max")), ((0,), ("max",))]
)
def test_no_sequence_of_steps_on_a_mesh_of_three_axes_is_better(
    shape: tuple[int, ...], reductions: tuple[str, ...]
) -> None:
    assert disagreements(shape, [grid(2, 2, 2)], reductions, four_suffice=False) == []


CROSSINGS = [
    pytest.param(grid(2), Placement([2, 3]), id="disjoint"),
    pytest.param(grid(2), Placement([1, 2]), id="overlapping"),
    pytest.param(grid(4), Placement([1, 3]), id="nested"),
    pytest.param(grid(1), grid(3), id="one-to-many"),
    pytest.param(grid(3), Placement([1]), id="many-to-one"),
    pytest.param(grid(4), grid(2, 2), id="line-to-grid"),
    pytest.param(grid(2, 2), grid(4), id="grid-to-line"),
]


@pytest.mark.parametrize(("before", "after"), CROSSINGS)
@pytest.mark.parametrize("shape", [(12, 12), (5, 4)])
def test_no_sequence_of_steps_between_placements_is_better(
    before: Placement, after: Placement, shape: tuple[int, ...]
) -> None:
    assert disagreements(shape, [before, after]) == []


@pytest.mark.parametrize(("before", "after"), CROSSINGS)
@pytest.mark.parametrize("shape", [(12, 12), (5, 4)])
def test_if_asked_no_route_of_as_few_bytes_moves_fewer_between_placements(
    before: Placement, after: Placement, shape: tuple[int, ...]
) -> None:
    oracle = Oracle.of(shape, "float32", [before, after], ("sum",))
    for source, target in product(oracle.states, repeat=2):
        if (source[0], target[0]) == (before, after):
            found = route(shape, "float32", source, target, fewest_between=True)
            between = [step.size_bytes for step in found.steps if step.source[0] != step.target[0]]

            assert price(found)[0] == route(shape, "float32", source, target).bytes
            assert between == [oracle.fewest_between(source, target)]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "mesh", [(1, 2), (1, 3), (1, 4), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]
)
@pytest.mark.parametrize("shape", [(24, 48), (7, 4), (24, 24, 24), (9, 5, 6)])
def test_no_sequence_of_steps_on_any_mesh_of_two_axes_is_better(
    mesh: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    assert disagreements(shape, [grid(*mesh)]) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", [(24, 24, 24), (7, 5), (8, 3, 12)])
def test_no_sequence_of_steps_on_eight_ranks_in_three_axes_is_better(
    shape: tuple[int, ...],
) -> None:
    assert disagreements(shape, [grid(2, 2, 2)], four_suffice=False) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(grid(2, 2), Placement([[1, 0], [3, 2]]), id="same-ranks-in-other-order"),
        pytest.param(grid(2, 2), Placement([[2, 3], [4, 5]]), id="overlapping"),
        pytest.param(grid(2, 2), Placement([[4, 5], [6, 7]]), id="disjoint"),
        pytest.param(grid(2, 4), Placement([[1, 2], [5, 6]]), id="nested"),
        pytest.param(grid(2, 3), grid(3, 2), id="other-shape"),
        pytest.param(grid(2, 4), grid(4, 2), id="other-shape-of-eight"),
        pytest.param(grid(2, 2), Placement([5]), id="many-to-one"),
        pytest.param(grid(1), grid(2, 3), id="one-to-many"),
        pytest.param(grid(1, 2), Placement([[1, 2, 3], [0, 4, 5]]), id="growing"),
        pytest.param(grid(2, 2, 2), Placement([[0, 2], [5, 9]]), id="three-axes-to-two"),
    ],
)
@pytest.mark.parametrize("shape", [(24, 24), (5, 4)])
def test_no_sequence_of_steps_between_any_placements_is_better(
    before: Placement, after: Placement, shape: tuple[int, ...]
) -> None:
    four = max(before.num_axes, after.num_axes) < 3

    assert disagreements(shape, [before, after], four_suffice=four) == []
