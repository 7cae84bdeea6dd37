"""Lists of boxing cases for the conformance suite: every pair of nd-SBPs, and every kind of step.

A family is a list of cases (conversions of a tensor) in a fixed order, for a number of ranks.
`FAMILIES` has all families; `sample` takes some cases of one. In the docstrings below, "each" means
with every shape (even, uneven, too short for all ranks) and every dtype that has such values. "In
turn" means that each pair gets only one shape and dtype, the next ones in a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from math import prod
from types import MappingProxyType

from sbp_core.boxing import StepKind, can_transfer, is_realisable
from sbp_core.placement import Placement
from sbp_core.sbp import REDUCTIONS, B, Broadcast, NdSbp, P, Partial, S, Sbp, Split, all_entries
from sbp_torch.testing.boxing.conversion_cases import BoxingCase, State, hand_made_step

#: (number of ranks, dtypes) -> cases.
Family = Callable[[int, tuple[str, ...]], tuple[BoxingCase, ...]]

#: A conversion without shape and dtype: source and target.
_Pair = tuple[State, State]

#: Number of ranks -> 2-D meshes: those with every shape and dtype, and those with these in turn.
_FULL = {4: ((2, 2),), 6: ((2, 3),)}
_IN_TURN = {2: ((1, 2),), 3: ((3, 1),), 6: ((3, 2),), 8: ((2, 4),)}

#: Cases of each family in `quick_cases`: enough to include every kind of step, dtype and placement.
_QUICK = 100
_QUICK_LARGE = 12

#: A number that shares no factor with any cycle of shapes, dtypes or entries.
_STRIDE = 7919


def holds(dtype: str, *sbps: NdSbp) -> bool:
    """Whether a dtype has the partial values of some nd-SBPs: bool has no sums."""
    return dtype != "bool" or not any(P in sbp for sbp in sbps)


def shapes_for(mesh_shape: Sequence[int], num_dims: int) -> tuple[tuple[int, ...], ...]:
    """Return an even, an uneven and a too short shape for every split on a mesh."""
    size = prod(mesh_shape)
    even = (size, 2 * size, size)
    uneven = (size + 1, 2 * size - 1, size + 2)
    short = (1, max(1, size - 1), 2)
    return even[:num_dims], uneven[:num_dims], short[:num_dims]


def _each(
    pairs: Iterable[_Pair], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> Iterator[BoxingCase]:
    """Yield every pair with every shape and every dtype that has such values."""
    for (source, target), shape, dtype in product(pairs, shapes, dtypes):
        if holds(dtype, source[1], target[1]):
            yield BoxingCase(shape=shape, dtype=dtype, source=source, target=target)


def _in_turn(
    pairs: Iterable[_Pair], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> Iterator[BoxingCase]:
    """Yield every pair with the next shape and the next dtype that has such values."""
    for number, (source, target) in enumerate(pairs):
        fitting = [dtype for dtype in dtypes if holds(dtype, source[1], target[1])]
        if fitting:
            yield BoxingCase(
                shape=shapes[number % len(shapes)],
                dtype=fitting[number // len(shapes) % len(fitting)],
                source=source,
                target=target,
            )


def _states(
    placement: Placement, num_dims: int, reductions: Sequence[str] = REDUCTIONS
) -> list[State]:
    """Return the placement with every nd-SBP that a tensor of `num_dims` dims can have."""
    entries = all_entries(num_dims, reductions)
    return [(placement, NdSbp(*chosen)) for chosen in product(entries, repeat=placement.num_axes)]


def _changes(states: Sequence[State]) -> Iterator[_Pair]:
    """Yield every pair of different states."""
    return ((a, b) for a, b in product(states, repeat=2) if a != b)


def _mesh(shape: Sequence[int]) -> Placement:
    return Placement.grid(shape, ("x", "y", "z")[: len(shape)])


@lru_cache
def one_axis(num_ranks: int, dtypes: tuple[str, ...]) -> tuple[BoxingCase, ...]:
    """Every pair of S(0), S(1), S(2), B and P of every reduction; each; also empty, and scalar."""
    mesh = _mesh((num_ranks,))
    states = _states(mesh, 3)
    return (
        *_each(_changes(states), shapes_for((num_ranks,), 3), dtypes),
        *_in_turn(_changes(states), [(0, 2, 3), (2, 3, 0)], dtypes),
        *_each(_changes(_states(mesh, 0)), [()], dtypes),
    )


@lru_cache
def two_axes(num_ranks: int, dtypes: tuple[str, ...]) -> tuple[BoxingCase, ...]:
    """Every pair of S(0), S(1), B and P of every reduction on both axes; and some with S(2).

    Each on 2 x 2 and 2 x 3, in turn on other meshes.
    """
    cases: list[BoxingCase] = []
    for shape in _FULL.get(num_ranks, ()):
        cases += _each(_changes(_states(_mesh(shape), 2)), shapes_for(shape, 2), dtypes)
    for shape in _IN_TURN.get(num_ranks, ()):
        cases += _in_turn(_changes(_states(_mesh(shape), 2)), shapes_for(shape, 2), dtypes)
    for shape in _FULL.get(num_ranks, ()):
        pairs = [
            pair
            for pair in _changes(_states(_mesh(shape), 3, ("sum",)))
            if any(S(2) in sbp for _, sbp in pair)
        ]
        cases += _in_turn(pairs, shapes_for(shape, 3), dtypes)
    return tuple(cases)


@lru_cache
def three_axes(num_ranks: int, dtypes: tuple[str, ...]) -> tuple[BoxingCase, ...]:
    """Every pair of S(0), S(1), B and P on 2 x 2 x 2, in turn; for eight ranks only."""
    if num_ranks != 8:
        return ()
    shape = (2, 2, 2)
    states = _states(_mesh(shape), 2, ("sum",))
    return tuple(_in_turn(_changes(states), shapes_for(shape, 2), dtypes))


def placement_pairs(num_ranks: int) -> Mapping[str, tuple[Placement, Placement]]:
    """Return pairs of placements by the relation between them; few ranks have fewer pairs."""
    ranks = list(range(num_ranks))
    if num_ranks == 1:
        return {}
    half = num_ranks // 2

    def line(some: Sequence[int]) -> Placement:
        return Placement(list(some), ("x",))

    pairs = {
        "1 to n": (line([0]), line(ranks)),
        "n to 1": (line(ranks), line([num_ranks - 1])),
        "same ranks": (line(ranks), line([*ranks[1:], 0])),
        "disjoint": (line(ranks[:half]), line(ranks[half:])),
    }
    if num_ranks > 2:
        pairs["overlapping"] = (line(ranks[:-1]), line(ranks[:0:-1]))
        pairs["nested"] = (line(ranks), line(ranks[1 : 1 + half]))
        pairs["nested, growing"] = (line(ranks[-half:]), line(ranks))
    if num_ranks in _FULL:
        (shape,) = _FULL[num_ranks]
        pairs["two axes to one"] = (_mesh(shape), line(ranks))
        pairs["one axis to two"] = (line(ranks[1:3]), _mesh(shape))
    if num_ranks == 6:
        pairs["two axes to two"] = (_mesh((2, 3)), _mesh((3, 2)))
        pairs["two axes to one, disjoint"] = (_mesh((2, 2)), line(ranks[4:]))
    return pairs


@lru_cache
def across(num_ranks: int, dtypes: tuple[str, ...]) -> tuple[BoxingCase, ...]:
    """Every pair of S(0), S(1), B and P of every reduction, from one placement to another.

    Each if both have one axis, in turn if a mesh has two axes; and pairs of scalars, in turn.
    """
    cases: list[BoxingCase] = []
    for before, after in placement_pairs(num_ranks).values():
        pairs = product(_states(before, 2), _states(after, 2))
        larger = max(before, after, key=lambda placement: placement.size).mesh_shape
        spread = _each if before.num_axes == after.num_axes == 1 else _in_turn
        cases += spread(pairs, shapes_for(larger, 2), dtypes)
        cases += _in_turn(product(_states(before, 0), _states(after, 0)), [()], dtypes)
    return tuple(cases)


@lru_cache
def steps(num_ranks: int, dtypes: tuple[str, ...]) -> tuple[BoxingCase, ...]:
    """Every kind of step by itself, whether the router would choose it or not.

    Each on a mesh of one axis, in turn on one axis of larger meshes and between placements.
    """
    line = _mesh((num_ranks,))
    cases = list(_collectives(line, 1, shapes_for((num_ranks,), 2), dtypes, _each))
    for shape in _meshes(num_ranks):
        cases += _collectives(_mesh(shape), 1, shapes_for(shape, 2), dtypes, _in_turn)
    pairs = [(line, line), *placement_pairs(num_ranks).values()]
    for before, after in pairs:
        states = product(_states(before, 2), _states(after, 2))
        moves = [(a, b) for a, b in states if a != b and can_transfer(a[1], b[1])]
        shapes = shapes_for(max(before.mesh_shape, after.mesh_shape, key=prod), 2)
        cases += (replace(case, kind=StepKind.TRANSFER) for case in _in_turn(moves, shapes, dtypes))
    for case in _each(_changes(_states(line, 2)), shapes_for((num_ranks,), 2), dtypes):
        (source,), (target,) = case.source[1], case.target[1]
        pads = isinstance(source, Split) and target == P
        if isinstance(source, Broadcast) or pads:
            cases.append(replace(case, kind=StepKind.LOCAL, axes=(0,)))
    return tuple(cases)


@lru_cache
def merged_axes(num_ranks: int, dtypes: tuple[str, ...]) -> tuple[BoxingCase, ...]:
    """Every collective on several mesh axes at once, with any entries on the other axes; each."""
    return tuple(
        case
        for shape in _meshes(num_ranks)
        for count in range(2, len(shape) + 1)
        for case in _collectives(_mesh(shape), count, shapes_for(shape, 2), dtypes, _each)
    )


def _meshes(num_ranks: int) -> list[tuple[int, ...]]:
    """Return the tested meshes of more than one axis for a number of ranks."""
    meshes = [*_FULL.get(num_ranks, ()), *_IN_TURN.get(num_ranks, ())]
    return [*meshes, *([(2, 2, 2)] if num_ranks == 8 else [])]


@lru_cache
def large(num_ranks: int, dtypes: tuple[str, ...]) -> tuple[BoxingCase, ...]:
    """Every pair of S(0), S(1) and B, and from P; from 1 to n and back: tensors of megabytes.

    Each; transports use other methods for large tensors than for small ones.
    """
    shapes = [(512, 128 * num_ranks), (509, 131 * num_ranks + 1)]
    line = _mesh((num_ranks,))
    pairs = [pair for pair in _changes(_states(line, 2)) if not pair[1][1].has_partial]
    some = placement_pairs(num_ranks)
    pairs += [
        ((before, NdSbp(entry)), (after, NdSbp(B)))
        for before, after in (some[name] for name in ("1 to n", "n to 1") if name in some)
        for entry in (S(0), P)
    ]
    return tuple(_each(pairs, shapes, dtypes))


def _collectives(
    mesh: Placement,
    count: int,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    spread: Callable[..., Iterator[BoxingCase]],
) -> Iterator[BoxingCase]:
    """Yield every collective on every choice of `count` axes, with any entries on other axes."""
    others: tuple[Sbp, ...] = (*all_entries(2), P("max"))
    for axes in combinations(range(mesh.num_axes), count):
        if prod(mesh.mesh_shape[axis] for axis in axes) == 1:
            continue
        rest = product(others, repeat=mesh.num_axes - count)
        kinds: dict[_Pair, StepKind] = {}
        for kept, (kind, before, after) in product(rest, list(_entry_changes(count))):
            source, target = _weave(mesh, axes, before, kept), _weave(mesh, axes, after, kept)
            if _is_legal(source, axes):
                kinds[(mesh, source), (mesh, target)] = kind
        for case in spread(kinds, shapes, dtypes):
            made = replace(case, kind=(kind := kinds[case.source, case.target]), axes=axes)
            if is_realisable(hand_made_step(made, kind)):
                yield made


def _entry_changes(count: int) -> Iterator[tuple[StepKind, tuple[Sbp, ...], tuple[Sbp, ...]]]:
    """Yield each collective on `count` axes: kind, entries before, entries after."""
    splits = list(product((S(0), S(1)), repeat=count))
    whole: tuple[Sbp, ...] = (B,) * count
    for reduction in REDUCTIONS:
        addends: tuple[Sbp, ...] = (Partial(reduction),) * count
        yield StepKind.ALL_REDUCE, addends, whole
        for after in splits:
            yield StepKind.REDUCE_SCATTER, addends, after
    for before in splits:
        yield StepKind.ALL_GATHER, before, whole
        for after in splits:
            if after != before:
                yield StepKind.ALL_TO_ALL, before, after


def _weave(
    mesh: Placement, axes: Sequence[int], changed: Sequence[Sbp], kept: Sequence[Sbp]
) -> NdSbp:
    """Return the nd-SBP with entries `changed` on `axes`, and `kept` on the other axes."""
    inside, outside = iter(changed), iter(kept)
    return NdSbp(*(next(inside if axis in axes else outside) for axis in range(mesh.num_axes)))


def _is_legal(source: NdSbp, axes: Sequence[int]) -> bool:
    """Whether a collective may reduce on `axes` first: partial entries after them are the same."""
    reduced = source[axes[0]]
    inner = source[axes[0] :] if isinstance(reduced, Partial) else ()
    return all(entry == reduced for entry in inner if isinstance(entry, Partial))


#: The families of boxing cases, by name.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "one axis": one_axis,
        "two axes": two_axes,
        "three axes": three_axes,
        "across placements": across,
        "steps": steps,
        "merged axes": merged_axes,
        "large": large,
    }
)


def sample(cases: Sequence[BoxingCase], count: int) -> tuple[BoxingCase, ...]:
    """Return `count` of the cases, or all if there are no more, spread evenly over the list."""
    if len(cases) <= count:
        return tuple(cases)
    return tuple(cases[number * _STRIDE % len(cases)] for number in range(count))


def quick_cases(num_ranks: int, dtypes: tuple[str, ...]) -> tuple[BoxingCase, ...]:
    """Return every pair on one axis in turn, and a sample of each family."""
    mesh = _mesh((num_ranks,))
    pairs = _in_turn(_changes(_states(mesh, 3)), shapes_for((num_ranks,), 3), dtypes)
    return (
        *pairs,
        *_in_turn(_changes(_states(mesh, 0)), [()], dtypes),
        *(
            case
            for name, family in FAMILIES.items()
            for case in sample(
                family(num_ranks, dtypes), _QUICK_LARGE if name == "large" else _QUICK
            )
        ),
    )
