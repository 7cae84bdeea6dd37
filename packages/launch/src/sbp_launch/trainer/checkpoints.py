"""Save the checkpoints of an `sbp-train` run when they are due, and remove the replaced ones."""

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

#: The checkpoint of a run whose loss is NaN or infinite, kept apart from those to resume from.
_NOT_FINITE = "not-finite"


def run_storage(run: Run) -> CheckpointStorage:
    """Return the storage of a run's checkpoints, without creating anything in it."""
    storage: CheckpointStorage = run.make("storage")(run.folder)
    return storage


def claim_storage(run: Run, storage: CheckpointStorage) -> AbstractContextManager[None]:
    """Keep other runs from writing to the storage inside the block; only process 0 does this."""
    return storage.claim() if run.is_first else nullcontext()


class RunCheckpoints:
    """Saves the checkpoints of a run, with all its processes.

    Args:
        run: The run.
        planned: Its plan.
        storage: The storage of the checkpoints.
        processes: All processes of the run.
        first_step: Number of steps done before it starts.
        clock: A monotonic clock, in seconds.
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
        #: The checkpoint that is written while steps continue, and its step.
        self._saves, self._saving_step = BackgroundSaves(), -1
        #: Checkpoints of an earlier run in the same folder; kept until there is a new one.
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
        """Save the states of a session, unless that was done; all processes call this.

        Args:
            session: The session, between two steps.
            state: The state of the trainer.
            cursor: The place in the data where the next step continues.
            is_finite: Whether a run can continue from it; if not, it is kept apart.

        Returns:
            Its place, for messages.

        Raises:
            RunError: it cannot be saved.
        """
        under_way = self._saves.name
        try:
            self.finish()
        except BoxingError:
            raise
        except SbpError as error:  # in all processes; the checkpoint saved below replaces it
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
        """Return the place of the checkpoint of a step, for messages, even if there is none."""
        return place_of(self._run, self.storage, step_name(step))

    def abandon(self) -> str:
        """Abandon the checkpoint that is being written, because a process is lost; return its name.

        After all surviving processes have done so, its incomplete files can be removed.
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
        """Save the surviving states of a run; all surviving processes call this. See `save`.

        Args:
            pieces: The pieces of the states that this process owns among the surviving ones.
            state: The state of the trainer.
            cursor: The place in the data where the next step continues.
            processes: The surviving processes.
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
        """Start to save the states of a session while it continues; all processes call this.

        Afterwards, the processes exchange after each step whether one `is_busy`, and call `go_on`
        if none is. With `trainer.checkpoint.wait`, the checkpoint is written when this returns.

        Args:
            session: The session, between two steps.
            state: The state of the trainer.
            cursor: The place in the data where the next step continues.
            tell: Called with a message if this must wait for an earlier checkpoint.

        Raises:
            RunError: this checkpoint, or the one before it, cannot be saved.
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
        """Whether this process is writing."""
        return self._saves.is_busy

    def go_on(self) -> None:
        """Continue the checkpoint that is being written, if any, when no process is busy.

        Raises:
            RunError: it cannot be saved.
        """
        if self._saves.go_on():
            self._saved_step = self._saving_step

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any; all processes call this.

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
        """Remove the checkpoints that a new one replaces."""
        kept = [] if state.best_step is None else [step_name(state.best_step)]
        remove(self.storage, [one for one in self._earlier if one != name])
        self._earlier = []
        prune(self.storage, self._settings.keep, kept)

    @property
    def newest(self) -> str:
        """The place of the checkpoint that was saved last, for messages; empty if there is none."""
        if self._saved_step < 0:
            return ""
        return self.place(self._saved_step)

    def read(self, names: set[str]) -> Mapping[str, Tensor]:
        """Return whole states of the checkpoint that was saved last."""
        with Checkpoint(self.storage, step_name(self._saved_step)) as checkpoint:
            return {name: checkpoint[name] for name in checkpoint if name in names}


def place_of(run: Run, storage: CheckpointStorage, name: str) -> str:
    """Return the path of a checkpoint, relative to the run folder if it is inside it."""
    return storage.place(name).removeprefix(f"{run.folder}/")
