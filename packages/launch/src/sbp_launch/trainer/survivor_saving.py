"""Save a checkpoint of a training run from the surviving processes, after a rank has failed.

`trainer.session` calls this; `checkpoint.survivors` decides which process saves which slices.
"""

from __future__ import annotations

from collections.abc import Iterable

from sbp_core.boxing import SurvivingRanks
from sbp_core.runtime import StatePiece
from sbp_launch.checkpoint.saving import Processes
from sbp_launch.checkpoint.survivors import MEET_S, surviving_pieces
from sbp_launch.run.run import Run
from sbp_launch.run.stopping import SAVING
from sbp_launch.step.saved import save_among_survivors
from sbp_launch.team import DEADLINE_S
from sbp_launch.trainer.loop import TrainingLoop


def save_with_survivors(run: Run, loop: TrainingLoop, error: Exception) -> str:
    """Save the states of a failed run with the surviving processes; each of them calls this.

    Returns:
        The place of the checkpoint, for messages.

    Raises:
        RunError: the states are not those of one step, a part of them is lost, or they cannot be
            written.
        BoxingError: the processes cannot reach each other, or another one has ended too.
    """
    run.say([SAVING])
    left = loop.team.survivors(error, MEET_S)
    try:
        return _save(run, loop, left)
    finally:
        left.leave()


def _save(run: Run, loop: TrainingLoop, left: SurvivingRanks) -> str:
    loop.count_done()
    # Abandon it before the other processes know: else removing it could remove their new files.
    under_way = loop.checkpoints.abandon()
    pieces, is_saved = surviving_pieces(
        loop.planned.plan,
        loop.step.session,
        left,
        loop.state.step,
        DEADLINE_S,
        is_saved=loop.checkpoints.has(loop.state.step),
    )
    if is_saved:
        return loop.checkpoints.place(loop.state.step)
    storage = loop.checkpoints.storage

    def prepare(processes: Processes) -> None:
        if processes.is_first and under_way:
            storage.stage(under_way).discard()

    def write(pieces: Iterable[StatePiece], processes: Processes) -> None:
        loop.checkpoints.save_pieces(pieces, loop.saved_state(), loop.cursor, processes)

    save_among_survivors(
        loop.step.processes, left, storage, pieces, prepare, write, is_claimed=run.is_first
    )
    return loop.checkpoints.place(loop.state.step)
