"""Reduce a conversion, from one layout of a tensor to another, to what its route depends on.

The router (`boxing.router`) caches the boxing steps that it finds by the result, a
`RoutingProblem`, so that similar conversions are searched once. Ranks become positions in meshes.
Max and min have the same routes, so the one that appears first is called `max`. The states that a
route may visit are given by a few entries for each axis. If all splits of all dims are even,
extents do not matter: dims are numbered in order of appearance, and the tensor counts as (source
ranks * target ranks) elements, enough to count every shard in whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

from sbp_core.boxing.routing.layout import (
    BROADCAST,
    MAX,
    MIN,
    SUM,
    Shared,
    Sizes,
    decode,
    encode,
    shared_places,
)
from sbp_core.boxing.routing.step_tables import Mesh
from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

#: A tensor's place and SBP.
State = tuple[Placement, NdSbp]

#: An nd-SBP as codes of `boxing.routing.layout`.
Codes = tuple[int, ...]

# The most states of one placement that are searched, and the most slices of them that are compared
# to fill a table.
_MOST_STATES = 700
_MOST_SLICES = 3_000_000


@dataclass(frozen=True, slots=True)
class RoutingProblem:
    """The canonical form of a conversion; conversions with equal problems share a route.

    Args:
        meshes: The source placement, and the target placement; None if they are the same.
        shared: Ranks in both; empty if they are the same placement.
        sizes: Sizes of the dims along which the tensor may be split.
        source, target: The two ends.
    """

    meshes: tuple[Mesh, Mesh | None]
    shared: Shared
    sizes: Sizes
    source: Codes
    target: Codes


@dataclass(frozen=True, slots=True)
class Naming:
    """The translation of the codes and sizes of a problem to the conversion's.

    Args:
        codes: The conversion's code for each code of the problem.
        elements: Elements of the tensor for each `unit` elements of the problem.
        unit: See `elements`.
    """

    codes: dict[int, int]
    elements: int
    unit: int

    def sbp(self, codes: Codes) -> NdSbp:
        """Return the nd-SBP of a state of the problem."""
        return NdSbp(*(decode(self.codes[code]) for code in codes))

    def size(self, elements: int) -> int:
        """Return the tensor's number of elements for a number of the problem's."""
        return elements * self.elements // self.unit


def pose_problem(
    shape: Sequence[int], source: State, target: State
) -> tuple[RoutingProblem, Naming]:
    """Return the problem of a conversion, and the meaning of its names.

    Raises:
        SbpValueError: even the fewest states that a route may pass through are too many to search.
    """
    # If both placements' sizes divide every extent, every split of every dim is even, on any route.
    # Then lengths are fractions of the tensor, and one problem stands for all such tensors: extents
    # become `parts`, and the tensor is counted as (source size * target size) elements.
    ends = (source, target)
    codes = [tuple(map(encode, sbp)) for _, sbp in ends]
    parts = lcm(*(placement.size for placement, _ in ends))
    even = bool(shape) and all(extent and extent % parts == 0 for extent in shape)
    # The first choice of states that is small enough: from all states that could be useful to the
    # entries of the two ends. So a search of a large problem may miss a cheaper detour; `B` and
    # both ends are among the entries of every choice.
    fitting = (
        choice
        for choice in _choices(shape, codes, parts if even else 0, source[0] == target[0])
        if all(_fits(one, end[0]) for one, end in zip(choice[1], ends, strict=True))
    )
    found = next(fitting, None)
    if found is None:
        raise SbpValueError(
            f"a route from {source[1]} on a mesh of {list(source[0].mesh_shape)} to {target[1]} on "
            f"{list(target[0].mesh_shape)} has too many intermediate states to search",
            accepted="conversions that change fewer mesh axes at once",
            todo="box to an SBP between the two first, or use a mesh of fewer axes",
        )
    dims, entries = found
    names = {dim: number for number, dim in enumerate(dims)} | {BROADCAST: BROADCAST, SUM: SUM}
    # max and min behave alike: a conversion with min instead of max has the same routes.
    first = next((code for both in codes for code in both if code in (MAX, MIN)), MAX)
    names |= {first: MAX, MAX + MIN - first: MIN}
    first_mesh, other_mesh = (
        (end[0].mesh_shape, tuple(_sorted(names[code] for code in axis) for axis in one))
        for one, end in zip(entries, ends, strict=True)
    )
    shared: Shared = ()
    meshes: tuple[Mesh, Mesh | None] = (first_mesh, None)
    if source[0] != target[0]:
        meshes = (first_mesh, other_mesh)
        shared = shared_places(source[0].rank_list, target[0].rank_list)
    if even:
        whole = source[0].size * target[0].size
        sizes = Sizes((parts,) * len(dims), whole)
        naming = (prod(shape), whole)
    else:
        sizes = Sizes(tuple(shape[dim] for dim in dims) or (1,), 0)
        naming = (prod(extent for dim, extent in enumerate(shape) if dim not in dims), 1)
    start, end = (tuple(names[code] for code in both) for both in codes)
    back = {name: code for code, name in names.items()}
    return RoutingProblem(meshes, shared, sizes, start, end), Naming(back, *naming)


def _sorted(codes: Iterable[int]) -> Codes:
    """Return codes in the order of enumeration: splits, `B`, partials."""
    return tuple(sorted(codes, key=lambda code: (code < 0, abs(code))))


def _fits(entries: tuple[Codes, ...], placement: Placement) -> bool:
    """Return whether a search over these entries is small enough."""
    states = prod(map(len, entries))
    forms = prod(1 + sum(code >= 0 for code in axis) for axis in entries)
    return states <= _MOST_STATES and forms**2 * placement.size <= _MOST_SLICES


def are_searched(placement: Placement, num_dims: int, num_partials: int) -> bool:
    """Return whether the search on one placement covers all states of a tensor.

    Args:
        placement: Placement of both ends.
        num_dims: Dims of the tensor. If its splits are all even, only dims that an end splits
            count, and as many more as there are mesh axes.
        num_partials: Kinds of reductions that the ends have.
    """
    entries = (*range(num_dims), BROADCAST, *range(SUM, SUM - num_partials, -1))
    return _fits((entries,) * placement.num_axes, placement)


def _choices(
    shape: Sequence[int], codes: Sequence[Codes], parts: int, same: bool
) -> Iterator[tuple[list[int], list[tuple[Codes, ...]]]]:
    """Yield (dims to split along, entries of each axis of each end), each choice smaller.

    Args:
        shape: Shape of the tensor.
        codes: The two ends.
        parts: Number that all extents are divisible by, if all splits are even, else 0.
        same: Whether the two ends are on one placement.
    """
    used = sorted({code for both in codes for code in both}, reverse=True)
    appear = list(dict.fromkeys(code for both in codes for code in both if code >= 0))
    partial = [code for code in used if code <= SUM]
    spare = [dim for dim in range(len(shape)) if dim not in appear]
    # All even dims that no end splits are alike; a state can use one of them on each axis.
    most = [*appear, *spare[: max(map(len, codes))]] if parts else list(range(len(shape)))
    yield most, [((*most, BROADCAST, *partial),) * len(both) for both in codes]
    # Fewer: only the largest of the dims that neither end splits, and partials on an axis only if
    # an end has them there.
    likely = sorted(spare, key=lambda dim: -shape[dim])[:1]
    few = [*appear, *likely] if parts else sorted([*appear, *likely])
    own = [[{code} for code in both] for both in codes]
    if same:
        own = [[one | two for one, two in zip(*own, strict=True)]] * 2
    yield (
        few,
        [
            tuple((*few, BROADCAST, *sorted(axis & set(partial), reverse=True)) for axis in both)
            for both in own
        ],
    )
    # Fewer still: on each axis the entries of the ends there, and `B`; with a spare dim to split,
    # then without.
    for spares in (likely, []):
        yield (
            few,
            [
                tuple(tuple(sorted(axis | {BROADCAST, *spares}, reverse=True)) for axis in both)
                for both in own
            ],
        )
