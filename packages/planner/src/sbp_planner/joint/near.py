"""Where all signatures on all mesh axes are too many: those near what was found axis by axis.

    found      (S(0), S(0), B)
    looked at  (S(0), S(0), B)   (x, S(0), B)   (S(0), x, B)   (S(0), S(0), x)    for every x

On three axes a pointwise operator of three dims has some two hundred signatures, and a tensor some
hundred thousand conversions. Near what was found, a few dozen signatures are left, among which the
search is as on two axes. It is repeated around what it finds, until nothing better is near.

What is then proved is proved of these signatures alone. Of all there is a floor: each operator on
the rank with the largest shard, at its fastest, without any boxing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import StepProblem
from sbp_planner.joint.layers import repeated

#: Conversions to be priced, above which signatures are left out.
MAX_PRICES = 1_000_000


def floor_s(problem: StepProblem) -> float:
    """Return what operators take at least, in seconds of a step, whatever is boxed.

    Args:
        problem: The step, before anything of it is left out.
    """
    return float(sum(table.min() for table in problem.unary))


def limited(problem: StepProblem, *, tied: bool = True, max_prices: int | None = None) -> bool:
    """Leave out signatures that are far from what the problem starts from, if they are too many.

    Args:
        problem: The step, not priced yet; it is changed.
        tied: Whether equal layers are decided alike.
        max_prices: Conversions that may be priced; `MAX_PRICES` if None.

    Returns:
        Whether something was left out.
    """
    if problem.num_prices <= (MAX_PRICES if max_prices is None else max_prices):
        return False
    problem.restrict(near(problem, repeated(problem) if tied else ()))
    return True


def recentred(problem: StepProblem, values: Sequence[int], *, tied: bool) -> StepProblem:
    """Return a problem with the signatures near an assignment of another.

    Args:
        problem: The other; prices are shared.
        values: Of its variables.
        tied: Whether equal layers are decided alike.
    """
    found = StepProblem(problem.work, problem.decided(values), problem.axes, problem.pins)
    limited(found, tied=tied, max_prices=0)
    return found


def near(problem: StepProblem, ties: Sequence[Sequence[int]]) -> list[NDArray[np.int64]]:
    """Return for each variable the places of the values that differ on one axis at most.

    Args:
        problem: The step, with a value of each variable that it starts from.
        ties: Variables that are alike, which have the values near what any of them starts from.
    """
    options: dict[int, Sequence[tuple[object, ...]]] = {}
    for name, variable in problem.node_variable.items():
        options[variable] = problem.parts[name]
    for name, variable in problem.storage_variable.items():
        options[variable] = problem.storage_entries[name]
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
                    if any(_distance(one, of[centre]) <= 1 for centre in centres[variable])
                ],
                dtype=np.int64,
            )
        kept.append(found[key])
    return kept


def _distance(one: Sequence[object], other: Sequence[object]) -> int:
    """Return on how many axes two signatures differ."""
    return sum(a != b for a, b in zip(one, other, strict=True))
