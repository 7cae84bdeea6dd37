"""What a parallel step leaves in a folder: its strategy and plan, and checkpoints, as runs do."""

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

#: What a checkpoint calls the settings of the optimizer's groups.
_GROUPS = "param_groups"


def processes_of(world: World, team: Team, elsewhere: str) -> Processes:
    """Return the processes of a step, as checkpoints know them."""
    if team.is_alone:
        return Processes(elsewhere=elsewhere)
    gather, ranks = partial(team.gather, what="a checkpoint"), tuple(range(world.size))
    return Processes(rank=world.rank, ranks=ranks, gather=gather, elsewhere=elsewhere)


def as_path(given: object, where: str) -> Path:
    """Return a path that a user gives.

    Args:
        given: Text, or an `os.PathLike` of text.
        where: The call that takes it.

    Raises:
        ConfigError: it is none.
    """
    try:
        text = os.fspath(given)  # type: ignore[call-overload] # what it raises is told
    except TypeError:
        text = None
    if not isinstance(text, str) or "\0" in text:
        raise ConfigError(f"{given!r} is no path", where=where, accepted="a text, or a Path")
    return user_path(text, where=where)


class StepSaves:
    """Saves the checkpoints of a parallel step: at once, or while later steps run.

    Args:
        states: Which there are, and the optimizers whose settings are saved with them.
        seed: Its seed.
        processes: Of the step.
    """

    def __init__(self, states: ProgramStates, seed: int, processes: Processes) -> None:
        self._states, self._seed, self._processes = states, seed, processes
        self._saves = BackgroundSaves()
        #: The claim to the folder of the one that is under way.
        self._claim = ExitStack()

    def save(self, folder: Path, session: Session, step: int, *, wait: bool) -> None:
        """Save a checkpoint, with strategy and plan; all processes call it.

        Raises:
            RunError: they cannot be written, or the checkpoint that is under way.
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
        """Save a checkpoint with the processes that are left, as another has ended; each calls it.

        Raises:
            RunError: the states are not those of one step, a part of them is lost, or they cannot
                be written.
            ConfigError: another program saves to this folder.
            BoxingError: another process has ended, too, or did not come.
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
        """See whether the checkpoint that is under way goes on; all processes call it.

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
        """Wait until the checkpoint that is under way is there; all processes call it.

        Raises:
            RunError: it cannot be written.
        """
        with self._claim:
            self._saves.finish()

    def end(self, error: BaseException | None) -> None:
        """Wait as `finish` does, unless an error ends the step in which others cannot be asked.

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
        except BoxingError as problem:  # which ended another process
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
    """Save what is left of the states, after a process has ended; each that is left calls it.

    Args:
        processes: All of them.
        left: The ranks that are left.
        storage: Where it is saved; the first process that is left takes it over.
        pieces: What this process owns of the states, among those that are left.
        prepare: Called before any process writes.
        write: Writes the checkpoint.
        is_claimed: Whether this process has claimed the storage already.

    Raises:
        RunError: it cannot be written.
        ConfigError: another program saves there.
        BoxingError: another process has ended, too, or did not come.
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

        now.agree(begin, "what is left cannot be written", storage.place())
        write(pieces, now)


@contextmanager
def _claimed(storage: CheckpointStorage, elsewhere: str) -> Iterator[None]:
    """Keep others from writing to a storage.

    Raises:
        ConfigError: another program does already.
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
    """Load the newest whole checkpoint that a path means; all processes call it.

    States are replaced one after the other, so that old and new ones are not held together. What is
    damaged is found when some are replaced already, unless all is read once before that.

    Args:
        path: Of one, or of a folder of them, of which damaged ones are passed over with a warning.
        training: Whose states are replaced, and whose groups get the settings that were saved.
        seed: Of the step.
        processes: Of the step.
        keeps: Whether the states are to be kept if a checkpoint is damaged: it is read twice.
        replacing: Called before states are replaced: if this function raises after that, the
            session has no states until it is given others.

    Returns:
        The step that the checkpoint is of.

    Raises:
        ConfigError: there is none, it does not fit, or was saved with another seed.
        DamagedError: the only one is damaged.
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
            logger.warning("%s; it is passed over", error.what)
        else:
            metadata = checkpoint.manifest.metadata
            restore_groups(training.states.groups, metadata.settings.get(_GROUPS), checkpoint.place)
            return metadata.step
    raise none_is_whole(storage, len(names))


def _check_seed(checkpoint: Checkpoint, seed: int) -> None:
    """See that the step draws the random numbers of the one that was saved.

    Raises:
        ConfigError: it does not.
    """
    saved = checkpoint.manifest.metadata.seed
    if saved != seed:
        raise ConfigError(
            f"{checkpoint.place} was written with seed={saved}, and this is seed={seed}",
            todo=f"pass seed={saved} to parallelize",
        )
