"""The checkpoints that a run saves: when, what, and which of them it keeps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from sbp_core.errors import BoxingError, SbpError
from sbp_core.graph import graph_hash
from sbp_core.plugins import CheckpointStorage, TrainerState
from sbp_core.runtime import Session, StatePiece
from sbp_core.serialize import dump
from sbp_launch.checkpoint.background import BackgroundSave, BackgroundSaves
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.places import AUTO, newest_first
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.saving import Processes, prune, remove, save
from sbp_launch.checkpoint.steps import step_name
from sbp_launch.data import DataCursor
from sbp_launch.planning import Planned
from sbp_launch.run.environment import versions
from sbp_launch.run.run import Run
from sbp_launch.trainer.saved_settings import config_hash, settings_of

logger = logging.getLogger(__name__)

#: What is kept of a run whose loss is no number, apart from the checkpoints to go on from.
_NOT_FINITE = "not-finite"


def run_storage(run: Run) -> CheckpointStorage:
    """Return where a run keeps its checkpoints; nothing is made there yet."""
    storage: CheckpointStorage = run.make("storage")(run.folder)
    return storage


def claim_storage(run: Run, storage: CheckpointStorage) -> AbstractContextManager[None]:
    """Keep other runs from writing to the storage inside the block; the first process does."""
    return storage.claim() if run.is_first else nullcontext()


class RunCheckpoints:
    """Saves the checkpoints of a run, with all its processes.

    Args:
        run: The run.
        planned: Its plan.
        storage: Where they go.
        processes: All of them.
        first_step: Steps done when it begins.
        clock: In seconds, one that is not set.
    """

    def __init__(
        self,
        run: Run,
        planned: Planned,
        storage: CheckpointStorage,
        processes: Processes,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self.storage, self._processes = run, storage, processes
        self._settings, self._clock, self._last_s = run.config.trainer.checkpoint, clock, clock()
        resumed_here = run.config.trainer.resume == AUTO
        self._saved_step = first_step if resumed_here and first_step else -1
        self._graph_hash = graph_hash(planned.graph)
        self._config_hash = config_hash(run.config)
        self._versions = versions()
        #: What is written while steps go on, and the step that it is of.
        self._saves, self._saving_step = BackgroundSaves(), -1
        #: Those of an earlier run in a folder that is to be overwritten: until there is a new one.
        self._earlier = [] if resumed_here else newest_first(storage)

    def is_due(self, step: int) -> bool:
        """Whether it is time to save after a step, counted from 1, by the clock of this process."""
        if steps := self._settings.every_steps:
            return step % steps == 0
        every_s = self._settings.every_s
        return every_s is not None and self._clock() - self._last_s >= every_s

    def save(
        self, session: Session, state: TrainerState, cursor: DataCursor, *, is_finite: bool = True
    ) -> str:
        """Save what a session has, unless that is done; all processes call it.

        Args:
            session: Between two steps.
            state: Of the trainer.
            cursor: Where the data go on.
            is_finite: Whether a run can go on from it; it is kept apart if not.

        Returns:
            Where it is, for people.

        Raises:
            RunError: it cannot be saved.
        """
        under_way = self._saves.name
        try:
            self.finish()
        except BoxingError:
            raise
        except SbpError as error:  # in all processes; the later one makes up for it
            logger.warning("%s is not saved: %s", under_way, error.what)
        name = step_name(state.step) if is_finite else f"{_NOT_FINITE}-{state.step:08d}"
        place = place_of(self._run, self.storage, name)
        if state.step == self._saved_step:
            return place
        metadata = self._metadata(state, cursor)
        save(self.storage, name, metadata, session.pieces(), self._processes)
        self._last_s = self._clock()
        if is_finite:
            self._saved_step = state.step
            if self._processes.is_first:
                self._remove_others(name, state)
        return place

    def has(self, step: int) -> bool:
        """Whether this process knows that the states of a step are saved."""
        return self._saved_step == step

    def place(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be, for people."""
        return place_of(self._run, self.storage, step_name(step))

    def abandon(self) -> str:
        """Give up the checkpoint that is under way, as another process is lost; return its name.

        When all that are left have done so, what was begun of it can be removed.
        """
        name, is_there = self._saves.abandon()
        if is_there:
            self._saved_step = self._saving_step
        return name

    def save_pieces(
        self,
        pieces: Iterable[StatePiece],
        state: TrainerState,
        cursor: DataCursor,
        processes: Processes,
    ) -> str:
        """Save what is left of a run; the processes that are left call it. See `save`.

        Args:
            pieces: What this process owns of the states, among those that are left.
            state: Of the trainer.
            cursor: Where the data go on.
            processes: Those that are left.
        """
        name = step_name(state.step)
        save(self.storage, name, self._metadata(state, cursor), pieces, processes)
        self._saved_step = state.step
        if processes.is_first:
            self._remove_others(name, state)
        return self.place(state.step)

    def begin(
        self, session: Session, state: TrainerState, cursor: DataCursor, tell: Callable[[str], None]
    ) -> None:
        """Begin to save what a session has, which is written while it goes on; all processes call.

        From then on, they tell each other after each step whether one `is_busy`, and call
        `go_on` if none is. With `trainer.checkpoint.wait` it is written when this returns.

        Args:
            session: Between two steps.
            state: Of the trainer.
            cursor: Where the data go on.
            tell: Is told if this has to wait for a checkpoint that is still being written.

        Raises:
            RunError: it, or the one before it, cannot be saved.
        """
        if self._settings.wait:
            self.save(session, state, cursor)
            return
        if self._saves.name:
            tell(f"waiting until {place_of(self._run, self.storage, self._saves.name)} is there")
            self.finish()
        if state.step == self._saved_step:
            return
        name = step_name(state.step)
        self._saving_step, self._last_s = state.step, self._clock()
        self._saves.begin(
            BackgroundSave(
                self.storage,
                name,
                self._metadata(state, cursor),
                session.snapshot(limit_bytes=self._settings.copy_bytes),
                self._processes,
                after_commit=lambda: self._remove_others(name, state),
            )
        )

    @property
    def is_busy(self) -> bool:
        """Whether this process writes."""
        return self._saves.is_busy

    def go_on(self) -> None:
        """Go on with the checkpoint that is under way, if there is one, because no process is busy.

        Raises:
            RunError: it cannot be saved.
        """
        if self._saves.go_on():
            self._saved_step = self._saving_step

    def finish(self) -> None:
        """Wait for the checkpoint that is under way, if there is one; all processes call it.

        Raises:
            RunError: it cannot be saved.
        """
        if self._saves.finish():
            self._saved_step = self._saving_step

    def _metadata(self, state: TrainerState, cursor: DataCursor) -> Metadata:
        return Metadata(
            step=state.step,
            seed=self._run.config.trainer.seed,
            cursor=cursor.to_json(),
            trainer=dump(state, TrainerState),
            settings=settings_of(self._run),
            graph_hash=self._graph_hash,
            config_hash=self._config_hash,
            versions=self._versions,
        )

    def _remove_others(self, name: str, state: TrainerState) -> None:
        """Remove checkpoints that are not to be kept next to a new one."""
        kept = [] if state.best_step is None else [step_name(state.best_step)]
        remove(self.storage, [one for one in self._earlier if one != name])
        self._earlier = []
        prune(self.storage, self._settings.keep, kept)

    @property
    def newest(self) -> str:
        """Where the checkpoint is that was saved last, for people; empty if none was."""
        if self._saved_step < 0:
            return ""
        return self.place(self._saved_step)

    def read(self, names: set[str]) -> Mapping[str, Tensor]:
        """Return states of the checkpoint that was saved last, whole."""
        with Checkpoint(self.storage, step_name(self._saved_step)) as checkpoint:
            return {name: checkpoint[name] for name in checkpoint if name in names}


def place_of(run: Run, storage: CheckpointStorage, name: str) -> str:
    """Return where a checkpoint is: relative to the run folder, if it is there."""
    return storage.place(name).removeprefix(f"{run.folder}/")
