"""Save a checkpoint from the surviving processes, after another process has ended.

    rank 0   step 7 fails   "7"   ranks 0 and 2 together hold all states    saves its share
    rank 1   has ended
    rank 2   step 7 fails   "7"   comes to the same conclusion              saves its share

Ranks that failed together have taken the same steps, because a step commits before it changes a
state. They communicate over the control store, because the transport is broken. If only the ended
rank held a part of a split state, that part is lost, and nothing is saved.
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

#: Seconds that a rank waits for others that may have ended, too: a rank that computes learns of
#: the failure only when it next waits for other ranks.
MEET_S = 20.0

#: Longest time that the lock of an ended process lasts, and time between two attempts to take it.
_LOCK_S, _LOOK_S = 5.0, 0.02

#: Largest number of characters of a rank's error message.
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
    """Return the slices of states that this process saves; each surviving process calls this.

    Args:
        plan: The plan of the session.
        session: The session in which a step has failed.
        left: The surviving ranks.
        step: Number of steps that the session has done.
        limit_s: Seconds to wait for the other ranks.
        is_saved: Whether this process knows that the states of that step are saved.

    Returns:
        The slices, and whether any process knows that the states are saved already.

    Raises:
        RunError: ranks have taken different steps, or none, or a part of the states is lost.
        BoxingError: another process has ended, too, or did not answer.
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
    """Hold the lock of the storage in the place of rank 0, which has ended.

    The system releases the lock of a killed process with its last thread, a moment after the
    process is reported as ended. So this tries repeatedly.

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
