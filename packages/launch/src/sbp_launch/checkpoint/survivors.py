"""What processes save that are left of several, when another one has ended.

    rank 0   step 7 fails   "7"   what it and rank 2 hold makes up all states   saves its share
    rank 1   has ended
    rank 2   step 7 fails   "7"   as rank 0 knows, too                          saves its share

Ranks that failed together have taken the same steps, because a step commits before it changes a
state.
They speak over the control store: the transport is broken. Where a state was split over the ranks,
a part of it is lost with its only holder, and nothing is saved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from sbp_core.boxing import SurvivingRanks
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, RunError, words_of
from sbp_core.plugins import CheckpointStorage
from sbp_core.runtime import Session, StatePiece, lost_states

#: Seconds that ranks wait for others of which they do not know whether they are left: one that
#: computes hears of the failure when it next waits for others.
MEET_S = 20.0

#: Seconds that the lock of a process that has ended may last, and between two looks at it.
_LOCK_S, _LOOK_S = 5.0, 0.02

#: Most characters that a rank says of why it has no states.
_QUOTED = 1000


def surviving_pieces(
    plan: PhysicalPlan,
    session: Session,
    left: SurvivingRanks,
    step: int,
    limit_s: float,
    *,
    is_saved: bool = False,
) -> tuple[Iterable[StatePiece], bool]:
    """Return what this process owns of the states among those that are left; each calls this.

    Args:
        plan: Of the session.
        session: In which a step has failed.
        left: The ranks that are left.
        step: Behind which the session stands.
        limit_s: Seconds to wait for the others.
        is_saved: Whether this process knows that the states of that step are saved.

    Returns:
        The pieces, and whether any process knows that they are saved.

    Raises:
        RunError: the states are not those of one step, no step was done, or a part of them is lost.
        BoxingError: another process has ended, too, or did not come.
    """
    problem = ""
    pieces: Iterable[StatePiece] = ()
    try:
        pieces = session.pieces(among=left.ranks)
    except RunError as error:
        problem = words_of(error)[:_QUOTED]
    said = left.gather(json.dumps([step, is_saved, problem]), limit_s)
    steps: dict[int, list[int]] = {}
    any_saved = False
    for rank, text in zip(left.ranks, said, strict=True):
        its_step, its_saved, its_problem = json.loads(text)
        any_saved = any_saved or its_saved
        if its_problem:
            raise RunError(f"rank {rank} says: {its_problem}")
        steps.setdefault(its_step, []).append(rank)
    if len(steps) > 1:
        told = "; ".join(f"step {at}: {', '.join(map(str, of))}" for at, of in steps.items())
        raise RunError(f"the surviving ranks have not taken the same steps ({told})")
    if any_saved:
        return (), True
    if not session.steps_done:
        raise RunError("no step has been done")
    if lost := lost_states(plan, left.ranks):
        holders = sorted({rank for rest in lost.values() for rank in rest})
        raise RunError(
            f"rank{'s' * (len(holders) > 1)} {', '.join(map(str, holders))} alone held a part of "
            f"{len(lost)} state{'s' * (len(lost) != 1)}, such as {next(iter(lost))!r}"
        )
    return pieces, False


@contextmanager
def claimed_from_the_lost(storage: CheckpointStorage) -> Iterator[None]:
    """Keep other runs from writing to the storage, as rank 0 did, which has ended.

    The lock of a process that is killed goes with the last of its threads, a moment after it is
    seen to have ended.

    Raises:
        ConfigError: rank 0 has only stopped, or another run has begun here.
    """
    end = time.monotonic() + _LOCK_S
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(storage.claim())
                break
            except ConfigError:
                if time.monotonic() >= end:
                    raise
                time.sleep(_LOOK_S)
        yield
