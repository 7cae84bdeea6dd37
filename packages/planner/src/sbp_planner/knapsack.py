"""The knapsack of OSDP: one option for each item, so that a step is fastest and fits.

    minimise    sum_i t_i(o_i)                           o_i one of the options of item i    [s]
    such that   sum_i m_i(o_i) + F + max_i x_i(o_i) <= L                                     [B]

t, m and x are the seconds, the resident bytes and the transient bytes of an option, F what does not
depend on the choice, L the limit. An item may be a parameter with the options replicated and
sharded, or a block of which several parts may be sharded. Knows no graph and no cluster.

Solved exactly, bytes are never rounded. The transient is a maximum, so the problem is solved for
each value τ that it may have: under options with x <= τ it is a knapsack of capacity L - F - τ.
Every item begins with its fastest option; a pass over the items keeps the Pareto frontier of (bytes
saved, seconds added) against that. A point is dropped when even the best ratio of seconds to bytes
among the items to come could not bring it to fit in less time than a greedy choice takes.

                 seconds added
                   |          o            o  on the frontier
                   |      o                x  saves less than a point that is as fast
                   |   o     x             The frontier ends where enough is saved.
                   +---------------- bytes saved

Source: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI
2023, section 3 (the model; the search there is depth-first).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class KnapsackOption:
    """One way to have an item.

    Args:
        transient_bytes: Held beside everything else while the item is used.
        resident_bytes: Held all the time.
        seconds: What it adds to the time of a step.
    """

    transient_bytes: int = 0
    resident_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if min(self.transient_bytes, self.resident_bytes, self.seconds) < 0:
            raise SbpValueError(f"{self} is negative", accepted="bytes and seconds >= 0")


#: What may be chosen of one item; at least one option.
Options: TypeAlias = Sequence[KnapsackOption]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnapsackSolution:
    """What was chosen.

    Args:
        chosen: For each item, the index of its option.
        seconds: Sum of the options' times.
        memory_bytes: F, the resident bytes, and the largest transient.
    """

    chosen: tuple[int, ...]
    seconds: float
    memory_bytes: int


#: The options of the items so far: (option of the last one, those before).
_Chosen: TypeAlias = "tuple[int, _Chosen] | None"

#: (bytes saved, seconds added, options)
_Point = tuple[int, float, "_Chosen"]

#: (bytes saved, seconds added, index of the option), against the fastest option of an item.
_Change = tuple[int, float, int]


def evaluate(
    items: Sequence[Options], chosen: Sequence[int], fixed_bytes: int = 0
) -> KnapsackSolution:
    """Return time and memory of a choice."""
    taken = [options[index] for options, index in zip(items, chosen, strict=True)]
    resident = sum(option.resident_bytes for option in taken)
    transient = max((option.transient_bytes for option in taken), default=0)
    return KnapsackSolution(
        chosen=tuple(chosen),
        seconds=sum(option.seconds for option in taken),
        memory_bytes=fixed_bytes + resident + transient,
    )


def choose(
    items: Sequence[Options], limit_bytes: float, fixed_bytes: int = 0
) -> KnapsackSolution | None:
    """Return the fastest choice that fits; among equals the one with the least memory.

    Args:
        items: The options of each item.
        limit_bytes: L.
        fixed_bytes: F.

    Returns:
        The choice; None if nothing fits.
    """
    # Equal items beside each other keep the frontier small, as their sums coincide.
    order = sorted(range(len(items)), key=lambda index: (tuple(items[index]), index))
    transients = {option.transient_bytes for options in items for option in options}
    best: KnapsackSolution | None = None
    for transient in sorted(transients or {0}):
        if any(min(o.transient_bytes for o in options) > transient for options in items):
            continue
        ordered = [items[index] for index in order]
        found = _search(ordered, limit_bytes - fixed_bytes - transient, transient)
        if found is not None:
            chosen = [0] * len(items)
            for index, option in zip(order, found, strict=True):
                chosen[index] = option
            solution = evaluate(items, chosen, fixed_bytes)
            if best is None or _rank(solution) < _rank(best):
                best = solution
    return best


def _rank(solution: KnapsackSolution) -> tuple[float, int]:
    return solution.seconds, solution.memory_bytes


def _search(items: Sequence[Options], capacity: float, transient_bytes: int) -> list[int] | None:
    """Return the fastest options with at most that transient that fit; None if none do."""
    fastest = [_fastest(options, transient_bytes) for options in items]
    taken = [options[index] for options, index in zip(items, fastest, strict=True)]
    needed = sum(option.resident_bytes for option in taken) - capacity
    changes = [
        _changes(options, index, transient_bytes)
        for options, index in zip(items, fastest, strict=True)
    ]
    bound = _greedy_seconds(changes, needed)
    if bound == inf:
        return None
    ratios = [min((added / saved for saved, added, _ in own), default=inf) for own in changes]
    frontier: list[_Point] = [(0, 0.0, None)]
    for at, (first, own) in enumerate(zip(fastest, changes, strict=True)):
        frontier = _pareto(_extended(frontier, first, own), needed)
        ratio = min(ratios[at + 1 :], default=inf)
        frontier = [
            point
            for point in frontier
            if point[0] >= needed or point[1] + (needed - point[0]) * ratio <= bound
        ]
    fitting = (options for saved, _, options in frontier if saved >= needed)
    return _unlink(next(fitting))  # the first is the fastest


def _fastest(options: Options, transient_bytes: int) -> int:
    """Return the fastest option with at most that transient; among equals, of the fewest bytes."""
    allowed = [n for n, option in enumerate(options) if option.transient_bytes <= transient_bytes]
    return min(allowed, key=lambda n: (options[n].seconds, options[n].resident_bytes))


def _changes(options: Options, fastest: int, transient_bytes: int) -> list[_Change]:
    """Return what the other options save and add; those that save nothing are left out."""
    base = options[fastest]
    return [
        (base.resident_bytes - option.resident_bytes, option.seconds - base.seconds, index)
        for index, option in enumerate(options)
        if option.transient_bytes <= transient_bytes and option.resident_bytes < base.resident_bytes
    ]


def _greedy_seconds(changes: Sequence[Sequence[_Change]], needed: float) -> float:
    """Return the seconds that some fitting choice adds, rounded up; infinite if nothing fits.

    Takes the changes by rising ratio; of one item, a later one takes the place of an earlier one.
    """
    ordered = sorted(
        (added / saved, at, saved, added)
        for at, own in enumerate(changes)
        for saved, added, _ in own
    )
    taken: dict[int, tuple[int, float]] = {}
    total = 0
    for _, at, saved, added in ordered:
        before = taken.get(at, (0, 0.0))[0]
        if total < needed and saved > before:
            taken[at] = saved, added
            total += saved - before
    if total < needed:
        return inf
    # Sums in another order may differ in their last digits.
    return sum(added for _, added in taken.values()) * (1 + 1e-9)


def _extended(
    frontier: Sequence[_Point], fastest: int, changes: Sequence[_Change]
) -> Iterable[_Point]:
    """Yield every point with each option of one item more."""
    for saved, added, options in frontier:
        yield saved, added, (fastest, options)
        for saves, adds, index in changes:
            yield saved + saves, added + adds, (index, options)


def _pareto(points: Iterable[_Point], needed: float) -> list[_Point]:
    """Keep what no other point beats in both; saving more than is needed is worth nothing.

    Returns:
        Points with rising savings and rising seconds.
    """
    kept: list[_Point] = []
    for point in sorted(points, key=lambda entry: (entry[1], -entry[0])):
        if kept and (point[0] <= kept[-1][0] or kept[-1][0] >= needed):
            continue
        kept.append(point)
    return kept


def _unlink(chosen: _Chosen) -> list[int]:
    found: list[int] = []
    while chosen is not None:
        option, chosen = chosen
        found.append(option)
    return found[::-1]
