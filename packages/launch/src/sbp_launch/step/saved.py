"""Save and load checkpoints of a parallel step, with its plan, in the format of `sbp-train`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from sbp_core.boxing import SurvivingRanks
from sbp_core.errors import BoxingError, ConfigError, RunError
from sbp_core.graph import graph_hash
from sbp_core.plugins import CheckpointStorage
from sbp_core.runtime import Session, StatePiece
from sbp_core.user_paths import user_path
from sbp_launch.checkpoint.background import BackgroundSave, BackgroundSaves
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.manifest import DamagedError, Metadata
from sbp_launch.checkpoint.places import find_checkpoints
from sbp_launch.checkpoint.reading import Checkpoint, none_is_whole
from sbp_launch.checkpoint.saving import (
    Processes,
    ReadTogether,
    open_together,
    save,
    verify_together,
)
from sbp_launch.checkpoint.settings import COPY_BYTES
from sbp_launch.checkpoint.steps import step_name
from sbp_launch.checkpoint.survivors import claimed_from_the_lost, surviving_pieces
from sbp_launch.explaining.output import write_plan
from sbp_launch.run.environment import versions
from sbp_launch.step.loading import load_states
from sbp_launch.step.scalars import restore_groups, saved_groups
from sbp_launch.step.states import ProgramStates
from sbp_launch.step.training import Training
from sbp_launch.team import DEADLINE_S, Team
from sbp_launch.world import World

logger = logging.getLogger(__name__)

#: The entry of a checkpoint that has the settings of the optimizer's parameter groups.
_GROUPS = "param_groups"


def processes_of(world: World, team: Team, elsewhere: str) -> Processes:
    """Return the processes of a step, for checkpoints."""
    if team.is_alone:
        return Processes(elsewhere=elsewhere)
    gather, ranks = partial(team.gather, what="a checkpoint"), tuple(range(world.size))
    return Processes(rank=world.rank, ranks=ranks, gather=gather, elsewhere=elsewhere)


def as_path(given: object, where: str) -> Path:
    """Return a path that a user gives.

    Args:
        given: A `str`, or an `os.PathLike` of `str`.
        where: The call that takes the path, for messages.

    Raises:
        ConfigError: it is not a path.
    """
    try:
        text = os.fspath(given)  # type: ignore[call-overload] # reported below
    except TypeError:
        text = None
    if not isinstance(text, str) or "\0" in text:
        raise ConfigError(f"{given!r} is no path", where=where, accepted="a text, or a Path")
    return user_path(text, where=where)


class StepSaves:
    """Saves the checkpoints of a parallel step: at once, or while later steps run.

    Args:
        states: The states, and the optimizers whose settings are saved with them.
        seed: The seed of the step.
        processes: The processes of the step.
    """

    def __init__(self, states: ProgramStates, seed: int, processes: Processes) -> None:
        self._states, self._seed, self._processes = states, seed, processes
        self._saves = BackgroundSaves()
        #: The claim to the folder of the checkpoint that is being written.
        self._claim = ExitStack()

    def save(self, folder: Path, session: Session, step: int, *, wait: bool) -> None:
        """Save a checkpoint, with strategy and plan; all processes call it.

        Raises:
            RunError: this checkpoint, or one that is still being written, cannot be written.
            ConfigError: another program saves to this folder.
        """
        if self._saves.name:
            logger.warning("waiting until the checkpoint %s is there", self._saves.name)
            self.finish()
        storage, claim = LocalStorage(folder), ExitStack()

        def begin() -> None:
            if self._processes.is_first:
                claim.enter_context(_claimed(storage, self._processes.elsewhere))
                write_plan(folder, self._states.planned)

        with claim:
            self._processes.agree(begin, "the plan cannot be written", str(folder))
            self._write(storage, session, step, wait=wait)
            if not wait:
                self._claim = claim.pop_all()

    def save_survivors(
        self, folder: Path, session: Session, step: int, left: SurvivingRanks
    ) -> None:
        """Save a checkpoint after a process has ended; each surviving process calls this.

        Raises:
            RunError: the states are not those of one step, a part of them is lost, or they cannot
                be written.
            ConfigError: another program saves to this folder.
            BoxingError: another process has ended too, or did not make this call.
        """
        if self._saves.name:
            logger.warning("the checkpoint %s is not saved: a rank has ended", self._saves.name)
        self._saves.abandon()
        self._claim.close()
        storage = LocalStorage(folder)

        def prepare(processes: Processes) -> None:
            if processes.is_first:
                write_plan(folder, self._states.planned)

        def write(pieces: Iterable[StatePiece], processes: Processes) -> None:
            save(storage, step_name(step), self._metadata(step), pieces, processes)

        pieces, _ = surviving_pieces(self._states.plan, session, left, step, DEADLINE_S)
        save_among_survivors(self._processes, left, storage, pieces, prepare, write)

    def _metadata(self, step: int) -> Metadata:
        return Metadata(
            step=step,
            seed=self._seed,
            settings={_GROUPS: saved_groups(self._states.groups)},
            graph_hash=graph_hash(self._states.planned.graph),
            versions=versions(),
        )

    def _write(self, storage: LocalStorage, session: Session, step: int, *, wait: bool) -> None:
        given = storage, step_name(step), self._metadata(step)
        if wait:
            save(*given, session.pieces(), self._processes)
        else:
            snapshot = session.snapshot(limit_bytes=COPY_BYTES)
            self._saves.begin(BackgroundSave(*given, snapshot, self._processes))

    def after_step(self) -> None:
        """Check the checkpoint that is being written, for errors; all processes call this.

        Raises:
            RunError: it cannot be written.
        """
        if not self._saves.name:
            return
        if any(self._processes.gather("busy" if self._saves.is_busy else "")):
            return
        try:
            self._saves.go_on()
        finally:
            if not self._saves.name:
                self._claim.close()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; all processes call this.

        Raises:
            RunError: it cannot be written.
        """
        with self._claim:
            self._saves.finish()

    def end(self, error: BaseException | None) -> None:
        """Wait as `finish` does, unless an error ends the step and processes cannot agree.

        Raises:
            RunError: it cannot be written, and there is no `error`.
        """
        name = self._saves.name
        if error is not None and len(self._processes.ranks) > 1:
            if name:
                logger.warning("the checkpoint %s is not saved: the step ended in an error", name)
            self._claim.close()
            return
        try:
            self.finish()
        except BoxingError as problem:  # another process has ended
            logger.warning("the checkpoint %s is not saved: %s", name, problem.what)
        except RunError as problem:
            if error is None:
                raise
            logger.warning("the checkpoint %s is not saved: %s", name, problem.what)


def save_among_survivors(
    processes: Processes,
    left: SurvivingRanks,
    storage: CheckpointStorage,
    pieces: Iterable[StatePiece],
    prepare: Callable[[Processes], None],
    write: Callable[[Iterable[StatePiece], Processes], None],
    *,
    is_claimed: bool = False,
) -> None:
    """Save the surviving states after a process has ended; each surviving process calls this.

    Args:
        processes: All processes.
        left: The surviving ranks.
        storage: Where to save; the first surviving process claims it.
        pieces: The pieces of the states that this process owns among the surviving ones.
        prepare: Called before any process writes.
        write: Writes the checkpoint.
        is_claimed: Whether this process has already claimed the storage.

    Raises:
        RunError: it cannot be written.
        ConfigError: another program saves there.
        BoxingError: another process has ended too, or did not make this call.
    """
    now = Processes(
        rank=processes.rank,
        ranks=left.ranks,
        gather=lambda text: left.gather(text, DEADLINE_S),
        elsewhere=processes.elsewhere,
    )
    with ExitStack() as held:

        def begin() -> None:
            if now.is_first and not is_claimed:
                held.enter_context(claimed_from_the_lost(storage))
            prepare(now)

        now.agree(begin, "the surviving states cannot be written", storage.place())
        write(pieces, now)


@contextmanager
def _claimed(storage: CheckpointStorage, elsewhere: str) -> Iterator[None]:
    """Keep other programs from writing to a storage.

    Raises:
        ConfigError: another program already writes to it.
    """
    with ExitStack() as held:
        try:
            held.enter_context(storage.claim())
        except ConfigError as error:
            raise error.replaced(ConfigError, todo=elsewhere) from error
        yield


def load_step(
    path: Path,
    training: Training,
    seed: int,
    processes: Processes,
    *,
    keeps: bool,
    replacing: Callable[[], None],
) -> int:
    """Load the newest complete checkpoint at a path; all processes call this.

    States are replaced one after the other, so that old and new ones are not held together. If a
    piece is damaged, this is found after some states were replaced, unless `keeps` is set.

    Args:
        path: A checkpoint, or a folder of checkpoints, of which damaged ones are skipped with a
            warning.
        training: The training that gets the states and the saved settings of parameter groups.
        seed: The seed of the step.
        processes: The processes of the step.
        keeps: Whether to keep the states if a checkpoint is damaged, by reading it twice.
        replacing: Called before states are replaced: if this function raises after that, the
            session has no states until it is given others.

    Returns:
        The number of the step after which the checkpoint was saved.

    Raises:
        ConfigError: there is no checkpoint, it does not fit, or was saved with another seed.
        DamagedError: the only checkpoint is damaged.
    """
    found: list[tuple[CheckpointStorage, list[str]]] = []
    processes.agree(
        lambda: found.append(find_checkpoints(path)), "no checkpoint can be loaded", str(path)
    )
    ((storage, names),) = found
    for name in names:
        try:
            checkpoint = open_together(storage, name, processes)
            _check_seed(checkpoint, seed)
            if keeps:
                verify_together(checkpoint, processes)
            states = ReadTogether(checkpoint, replacing)
            load_states(training, states)
            if (problem := states.agree(processes)) is not None:
                raise problem
        except DamagedError as error:
            if len(names) == 1:
                raise
            logger.warning("%s; this checkpoint is skipped", error.what)
        else:
            metadata = checkpoint.manifest.metadata
            restore_groups(training.states.groups, metadata.settings.get(_GROUPS), checkpoint.place)
            return metadata.step
    raise none_is_whole(storage, len(names))


def _check_seed(checkpoint: Checkpoint, seed: int) -> None:
    """Check that the step has the seed, and so the random numbers, of the saved step.

    Raises:
        ConfigError: the seeds differ.
    """
    saved = checkpoint.manifest.metadata.seed
    if saved != seed:
        raise ConfigError(
            f"{checkpoint.place} was written with seed={saved}, and this is seed={seed}",
            todo=f"pass seed={saved} to parallelize",
        )
