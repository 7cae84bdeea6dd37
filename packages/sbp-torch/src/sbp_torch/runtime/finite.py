"""Detect a step with an infinite or NaN loss, and find until when a rank can undo it.

A step can be undone until its first update overwrites a state in place.

    forward  backward | commit | update
                               ^ last moment to undo: all ranks know the loss
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from sbp_core.compile import COMMIT, Actor, PhysicalPlan
from sbp_core.runtime import NotFiniteStepError

#: Names of results that have to be finite.
CHECKED = ("loss", "grad_norm")


def not_finite(results: Mapping[str, Tensor]) -> str:
    """Return the name of a result that has to be finite and is not, or ""."""
    for name in CHECKED:
        if name in results and not math.isfinite(results[name].item()):
            return name
    return ""


def undone_error(results: Mapping[str, Tensor], step: int) -> NotFiniteStepError:
    """Return the error of a step that was undone.

    Args:
        results: The results of the step that are known so far.
        step: The number of the step, from 0.
    """
    name = not_finite(results)
    error = NotFiniteStepError(
        f"{name} is {results[name].item()}",
        where=f"step {step}, which was undone",
        todo="states are those from before the step, and the session goes on",
    )
    error.outputs = results
    return error


def undo_limits(plan: PhysicalPlan) -> dict[tuple[int, str], int]:
    """Return by rank and thread how many firings of actors come before the first update in place.

    The number is that of all firings if nothing is overwritten in place, because new states take
    effect after them. It also is if a rank may overwrite a state before all ranks know the loss:
    several ranks without a commit, several threads in a rank, or a loss that is known too late.
    Then no step can be undone.
    """
    actors = [actor for part in plan.ranks for actor in part.actors]
    all_firings = {
        (part.rank, thread): [part.by_name[name] for name, _ in order]
        for part in plan.ranks
        for thread, order in part.orders.items()
    }
    everything = {thread: len(firings) for thread, firings in all_firings.items()}
    commits = any(actor.name == COMMIT for actor in actors)
    if not any(actor.in_place for actor in actors) or (len(plan.ranks) > 1 and not commits):
        return everything
    if len(all_firings) > len(plan.ranks):
        return everything
    found = {thread: _undo_limit(firings) for thread, firings in all_firings.items()}
    for thread, firings in all_firings.items():
        late = {name for actor in firings[found[thread] :] for name, _ in actor.emits}
        if "loss" in late:
            return everything
    return found


def _undo_limit(firings: Sequence[Actor]) -> int:
    """Return the index of the first firing after the commit, or that overwrites a state."""
    for index, actor in enumerate(firings):
        if actor.name == COMMIT:
            return index + 1
        if actor.in_place:
            return index
    return len(firings)
