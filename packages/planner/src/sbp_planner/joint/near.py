"""Limit the splits that the joint search considers, if a step has too many over all mesh axes.

It keeps the signatures (splits of one operator) near the plan that was found axis by axis.

    found      (S(0), S(0), B)
    looked at  (S(0), S(0), B)   (x, S(0), B)   (S(0), x, B)   (S(0), S(0), x)    for every x

On three axes a pointwise operator of three dims has some two hundred signatures, and a tensor some
hundred thousand conversions. Near the result axis by axis, a few dozen signatures remain. The
search among these is as on two axes. It is repeated around its result until nothing near is better.

Its proofs hold only for the signatures that were considered. For all signatures there is a separate
bound: conversions that were not priced have a lower bound on their cost
(`sbp_core.infer.LeastPrices`), the others their price, and moving costs gives the bound
(`joint.group_bound`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import ConversionGroup, CostTables, LeastPrices, StepProblem
from sbp_core.sbp import Partial
from sbp_core.signatures import Signature1d
from sbp_planner.choice.prove import prove
from sbp_planner.joint.group_bound import GroupBound
from sbp_planner.joint.layers import repeated, tie

#: Most entries in the table of one value with its users.
MAX_DIRECT_ENTRIES = 1 << 20

#: If there are more conversions to price than this, signatures are left out.
MAX_PRICES = 1_000_000


def limited(problem: StepProblem, *, tied: bool = True, max_prices: int | None = None) -> bool:
    """Leave out signatures that are far from the start of the problem, if there are too many.

    Args:
        problem: The step, not priced yet; it is changed.
        tied: Whether equal layers are decided alike.
        max_prices: How many conversions may be priced; `MAX_PRICES` if None.

    Returns:
        Whether signatures were left out.
    """
    if problem.num_prices <= (MAX_PRICES if max_prices is None else max_prices):
        return False
    problem.restrict(near(problem, repeated(problem) if tied else ()))
    return True


def recentred(problem: StepProblem, values: Sequence[int], *, tied: bool) -> StepProblem:
    """Return a problem with the signatures near an assignment of another problem.

    Args:
        problem: The other problem; prices are shared.
        values: The assignment: a value of each of its variables.
        tied: Whether equal layers are decided alike.
    """
    found = StepProblem(
        problem.work,
        problem.decided(values),
        problem.axes,
        problem.pins,
        problem.kept,
        layers=problem.layers,
    )
    limited(found, tied=tied, max_prices=0)
    return found


def least_s(problem: StepProblem, cost_s: float, *, tied: bool, time_limit_s: float) -> float:
    """Return a lower bound for the assignments of all signatures, in seconds of a step.

    Args:
        problem: The step with the remaining signatures, priced.
        cost_s: Cost of the best known assignment; nothing above it needs a proof.
        tied: Whether equal layers are decided alike.
        time_limit_s: For moving costs, after pricing; then the bound so far is returned.
    """
    work = problem.work
    whole = StepProblem(
        work,
        problem.decided(problem.start),
        problem.axes,
        problem.pins,
        problem.kept,
        prices=LeastPrices(work.placements, work.cluster),
        layers=problem.layers,
    )
    bound = GroupBound(tie(whole, with_prices(whole, problem), tied=tied))
    return bound.raised(cost_s, deadline=monotonic() + time_limit_s)


def bound_from_below(
    problem: StepProblem, *, tied: bool, time_limit_s: float, enough_s: float
) -> float:
    """Return a lower bound for the assignments of a step, without looking for a good one.

    Args:
        problem: The step, with all of its signatures.
        tied: Whether equal layers are decided alike.
        time_limit_s: For the proof, in seconds.
        enough_s: Nothing above this needs a proof, in seconds of a step.

    Returns:
        At most `enough_s`; 0 if there are so many signatures that not all are priced.
    """
    if problem.num_prices > MAX_PRICES:
        return 0.0
    tables = CostTables(tie(problem, tied=tied), max_entries=MAX_DIRECT_ENTRIES)
    deadline, start = monotonic() + time_limit_s, tuple(tables.start)
    return prove(tables.sizes, tables.factors, start, deadline=deadline, cutoff=enough_s).bound


def with_prices(whole: StepProblem, part: StepProblem) -> list[ConversionGroup]:
    """Return the conversions of a problem, with the costs of another problem where it has them.

    Args:
        whole: The problem, priced from below.
        part: The same step with some of the signatures, priced.
    """
    places = _places(whole, part)

    def users(group: ConversionGroup) -> tuple[object, ...]:
        """Return a key for the conversions of a value to some of its users."""
        return group.value, *(request.variable for request in group.requests)

    by_users = {users(group): group for group in part.groups}
    # Equal layers share tables, and still do in the result.
    made: dict[tuple[int, ...], NDArray[np.float64]] = {}
    found = []
    for group in whole.groups:
        other = by_users.get(users(group))
        if other is not None:
            key = (id(group.costs), id(other.costs), *(id(one.targets) for one in group.requests))
            if key not in made:
                # The costs of the group, with the costs of the part in their places.
                column = np.zeros(other.costs.shape[1], dtype=np.int64)
                for request, own in zip(group.requests, other.requests, strict=True):
                    at = places[request.variable] if request.variable >= 0 else slice(None)
                    column[own.targets] = request.targets[at]
                made[key] = group.costs.copy()
                block = np.ix_(places[group.source], column)
                made[key][block] = np.maximum(made[key][block], other.costs)
            group = replace(group, costs=made[key])
        found.append(group)
    return found


def _places(whole: StepProblem, part: StepProblem) -> list[NDArray[np.int64]]:
    """Return, for each variable, the places of the part's values in the whole."""
    found: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * len(whole.unary)
    # Equal layers have equal options, which are one object.
    made: dict[tuple[int, int], NDArray[np.int64]] = {}
    options = _options(part)
    for variable, of in _options(whole).items():
        key = (id(of), id(options[variable]))
        if key not in made:
            number = {one: place for place, one in enumerate(of)}
            made[key] = np.array([number[one] for one in options[variable]], dtype=np.int64)
        found[variable] = made[key]
    return found


def _options(problem: StepProblem) -> dict[int, Sequence[tuple[object, ...]]]:
    """Return, for each variable, the SBPs that its values stand for."""
    options: dict[int, Sequence[tuple[object, ...]]] = {}
    for name, variable in problem.node_variable.items():
        options[variable] = problem.parts[name]
    for name, variable in problem.storage_variable.items():
        options[variable] = problem.storage_entries[name]
    return options


def near(problem: StepProblem, ties: Sequence[Sequence[int]]) -> list[NDArray[np.int64]]:
    """Return, for each variable, the places of the values that differ on at most one axis.

    Every operator that is linear or moves elements can pass on partial maxima, but few operators
    make them. So values with maxima are near only where there are some already.

    Args:
        problem: The step, with a starting value for each variable.
        ties: Groups of equal variables, which keep the values near the start of any of them.
    """
    options = _options(problem)
    centres = {variable: {problem.start[variable]} for variable in options}
    for tied in ties:
        together = {problem.start[variable] for variable in tied}
        centres.update(dict.fromkeys(tied, together))
    found: dict[tuple[int, frozenset[int]], NDArray[np.int64]] = {}
    kept = []
    for variable in range(len(problem.unary)):
        of = options[variable]
        key = (id(of), frozenset(centres[variable]))
        if key not in found:
            found[key] = np.array(
                [
                    place
                    for place, one in enumerate(of)
                    if any(_is_near(one, of[centre]) for centre in centres[variable])
                ],
                dtype=np.int64,
            )
        kept.append(found[key])
    return kept


def _is_near(one: Sequence[object], centre: Sequence[object]) -> bool:
    """Return whether a signature is near another one."""
    differing = [part for part, other in zip(one, centre, strict=True) if part != other]
    return not differing or (
        len(differing) == 1 and _reductions(differing) <= {"sum", *_reductions(centre)}
    )


def _reductions(parts: Sequence[object]) -> set[str]:
    """Return the reductions of the partial entries of a signature, or of an SBP."""
    entries: list[object] = []
    for part in parts:
        entries += [*part.inputs, *part.outputs] if isinstance(part, Signature1d) else [part]
    return {entry.reduction for entry in entries if isinstance(entry, Partial)}
