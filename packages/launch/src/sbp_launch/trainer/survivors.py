"""What is saved of a run in which a rank has failed: by the processes that are left, if they can.

    rank 0   step 7 fails   "7"   what it and rank 2 hold makes up all states   saves its share
    rank 1   has ended
    rank 2   step 7 fails   "7"   as rank 0 knows, too                          saves its share

The ranks that failed together stand behind one step, as a step commits before it changes a state.
They speak over the control store: the transport is broken. Where a state was split over the ranks,
a part of it is lost with its only holder, and nothing is saved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from sbp_core.boxing import SurvivingRanks
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, RunError, words_of
from sbp_core.plugins import Storage
from sbp_core.runtime import lost_states
from sbp_launch.checkpoint.saving import Processes
from sbp_launch.planning.report import counted
from sbp_launch.run.run import Run
from sbp_launch.run.stopping import SAVING
from sbp_launch.trainer.checkpoints import ELSEWHERE
from sbp_launch.trainer.loop import TrainingLoop
from sbp_launch.trainer.team import DEADLINE_S

#: Seconds that ranks wait for others of which they do not know whether they are left: one that
#: computes hears of the failure when it next waits for others.
_MEET_S = 20.0

#: Seconds that the lock of a process that has ended may last, and between two looks at it.
_LOCK_S, _LOOK_S = 5.0, 0.02

#: Most characters that a rank says of why it has no states.
_QUOTED = 1000


def save_with_survivors(run: Run, loop: TrainingLoop, error: Exception) -> str:
    """Save the states of a run that failed, with the processes that are left; each calls this.

    Returns:
        Where they are, for people.

    Raises:
        RunError: the states are not those of one step, a part of them is lost, or they cannot be
            written.
        BoxingError: the processes cannot reach each other, or another one has ended, too.
    """
    run.say([SAVING])
    left = loop.team.survivors(error, _MEET_S)
    try:
        return _save(run, loop, left)
    finally:
        left.leave()


def _save(run: Run, loop: TrainingLoop, left: SurvivingRanks) -> str:
    loop.count_done()
    # Before the others are told: what they begin to write must not be removed with it.
    under_way = loop.checkpoints.abandon()
    problem = ""
    try:
        pieces = loop.session.pieces(among=left.ranks)
    except RunError as error:
        problem = words_of(error)[:_QUOTED]
    is_saved = loop.checkpoints.has(loop.state.step)
    said = left.gather(json.dumps([loop.state.step, is_saved, problem]), DEADLINE_S)
    if _check_step(left.ranks, said):
        return loop.checkpoints.place(loop.state.step)
    if not loop.session.steps_done:
        raise RunError("no step has been done")
    _check_whole(loop.planned.plan, left.ranks)
    processes = Processes(
        rank=run.world.rank,
        ranks=left.ranks,
        gather=lambda text: left.gather(text, DEADLINE_S),
        elsewhere=ELSEWHERE,
    )
    storage = loop.checkpoints.storage
    with ExitStack() as held:

        def prepare() -> None:
            if processes.is_first and not run.is_first:
                held.enter_context(_claimed_from_the_lost(storage))
            if processes.is_first and under_way:
                storage.stage(under_way).discard()

        processes.agree(prepare, "what is left cannot be written", storage.place())
        return loop.checkpoints.save_pieces(pieces, loop.saved_state(), loop.cursor, processes)


@contextmanager
def _claimed_from_the_lost(storage: Storage) -> Iterator[None]:
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


def _check_step(ranks: Sequence[int], said: Sequence[str]) -> bool:
    """See that all ranks have whole states, of one step; return whether these are saved already.

    Raises:
        RunError: they do not.
    """
    steps: dict[int, list[int]] = {}
    any_saved = False
    for rank, text in zip(ranks, said, strict=True):
        step, is_saved, problem = json.loads(text)
        any_saved = any_saved or is_saved
        if problem:
            raise RunError(f"rank {rank} says: {problem}")
        steps.setdefault(step, []).append(rank)
    if len(steps) > 1:
        told = "; ".join(
            f"step {step}: {', '.join(map(str, ranks))}" for step, ranks in steps.items()
        )
        raise RunError(f"the ranks that are left do not stand behind one step ({told})")
    return any_saved


def _check_whole(plan: PhysicalPlan, ranks: Sequence[int]) -> None:
    """See that ranks hold all states together.

    Raises:
        RunError: a part of some is lost with others.
    """
    lost = lost_states(plan, ranks)
    if not lost:
        return
    holders = sorted({rank for rest in lost.values() for rank in rest})
    gone = ", ".join(map(str, holders))
    name = next(iter(lost))
    raise RunError(
        f"rank{'s' if len(holders) > 1 else ''} {gone} alone held a part of "
        f"{counted(len(lost), 'state')}, such as {name!r}"
    )
