"""Resume a run from the newest complete checkpoint, and report settings that have changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from sbp_core.errors import ConfigError, SbpValueError, words_of
from sbp_core.plugins import CheckpointStorage, TrainerState
from sbp_core.runtime import Session
from sbp_core.serialize import load
from sbp_launch.checkpoint.folder_storage import MANIFEST_FILE
from sbp_launch.checkpoint.manifest import DamagedError, Metadata
from sbp_launch.checkpoint.places import AUTO, find_checkpoints, newest_first
from sbp_launch.checkpoint.reading import Checkpoint, none_is_whole
from sbp_launch.checkpoint.saving import Processes, ReadTogether
from sbp_launch.checkpoint.steps import step_of
from sbp_launch.checkpoint.tensors import dtype_name
from sbp_launch.data import DataCursor, SampleOrder
from sbp_launch.run.run import Run
from sbp_launch.trainer.checkpoints import place_of
from sbp_launch.trainer.run_program import RunProgram
from sbp_launch.trainer.saved_settings import differences, settings_of


class Resume:
    """The checkpoint from which a run continues: the newest complete one of those allowed.

    Attributes:
        states: The states with which a session is started, read in parts.

    Args:
        run: The run.
        storage: The storage of the checkpoints.
        names: The names of the checkpoints to try, in this order.

    Raises:
        ConfigError: none of them has a complete manifest, or its seed is not the run's.
    """

    def __init__(self, run: Run, storage: CheckpointStorage, names: list[str]) -> None:
        self._run, self._storage, self._names = run, storage, list(names)
        self._num_given = len(names)
        #: The warning about the checkpoint that was skipped last.
        self._skipped_last = ""
        #: The names of the states in the run.
        self._own: Collection[str] = ()
        self.states = self._next()

    @classmethod
    def of(cls, run: Run, storage: CheckpointStorage) -> Resume | None:
        """Return the checkpoint that `trainer.resume` selects; None if the run starts at step 0.

        Raises:
            ConfigError: a checkpoint is required, and there is no complete one.
        """
        wanted = run.config.trainer.resume
        if wanted is None:
            return None
        if wanted != AUTO:
            found, names = find_checkpoints(wanted)
            return cls(run, found, names)
        names = newest_first(storage)
        if not names:
            run.say(["trainer.resume=auto: there is no checkpoint yet, starting at step 0"])
            return None
        return cls(run, storage, names)

    @property
    def metadata(self) -> Metadata:
        """The state of the run at the checkpoint."""
        return self.states.checkpoint.manifest.metadata

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Return a context that adds the checkpoint to errors on states that do not fit.

        Raises:
            ConfigError: a state does not fit.
        """
        try:
            yield
        except SbpValueError as error:
            raise self._misfit(error.what, error.where, error.accepted) from error

    def check_data(self, order: SampleOrder) -> None:
        """Check that data and sample order are those of the checkpoint.

        With `trainer.allow_other_data`, differences are printed instead.

        Raises:
            ConfigError: they differ.
        """
        if self.metadata.cursor is None:
            return
        where = self._storage.place(self.states.checkpoint.name, MANIFEST_FILE)
        cursor = DataCursor.from_json(self.metadata.cursor, where=where)
        if not self._run.config.trainer.allow_other_data:
            cursor.check_same_data(order, where=where)
        for told in cursor.differences(order):
            self._run.say([f"other than in {self.states.checkpoint.name}: {told}"])

    def check_states(self, program: RunProgram) -> None:
        """Check, before planning, that the checkpoint has the states that the run starts with.

        Raises:
            ConfigError: a state is missing, unknown, or has another shape or dtype.
        """
        own = program.made.states(program.optimizer, self._run.config.trainer.update)
        self._own = own.keys()
        self.states.call(self._own)
        saved = {name: self.states.like(name) for name in self.states.names}
        found = []
        for name, value in program.model.named_parameters():
            was = saved.get(name)
            if was is not None and (was.dtype, was.shape) != (value.dtype, value.shape):
                found.append(f"{name!r} is {_form(was)} in it, and {_form(value)} in the model")
        found += [f"it has no {name!r}" for name in sorted(own.keys() - saved.keys())]
        found += [f"it has {name!r}, too" for name in sorted(saved.keys() - own.keys())]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise self._misfit(found[0] + more)

    def _misfit(self, what: str, where: tuple[str, ...] = (), accepted: str = "") -> ConfigError:
        return ConfigError(
            f"the checkpoint does not fit this model and optimizer: {what}",
            where=(*where, self._place),
            accepted=accepted,
            todo="choose the model, optimizer and update options of the run that saved it; to take "
            "its weights alone: trainer.init_from=RUN",
        )

    def agree(self, session: Session, processes: Processes) -> TrainerState:
        """Check that all processes have read a checkpoint completely; otherwise try the next one.

        Returns:
            The state of the trainer at the checkpoint.

        Raises:
            ConfigError: no checkpoint is complete.
        """
        self._follow_others(session, processes)
        while (problem := self.states.agree(processes)) is not None:
            self._skip(problem)
            self._load_next(session)
            self._follow_others(session, processes)
        self._run.say([f"continuing after step {self.metadata.step}, from {self._place}"])
        return self._trainer_state()

    def _follow_others(self, session: Session, processes: Processes) -> None:
        """Use the checkpoint of the other processes, if these have found a newer one damaged.

        Before the session starts, processes cannot communicate, so each has opened the newest
        checkpoint that it found complete. `ReadTogether.agree` reports other differences.

        Raises:
            ConfigError: no checkpoint is complete.
        """
        while True:
            texts = processes.gather(f"{self.states.checkpoint.name}\n{self._skipped_last}")
            said = {
                rank: text.partition("\n")[::2]
                for rank, text in zip(processes.ranks, texts, strict=True)
            }
            behind = min(said, key=lambda rank: step_of(said[rank][0]) or 0)
            (name, why), names = said[behind], {name for name, _ in said.values()}
            if len(names) == 1 or not why:
                return
            if name != self.states.checkpoint.name:
                self._skip(DamagedError(f"rank {behind} says: {why}"))
                taken = step_of(name) or 0
                self._names = [one for one in self._names if (step_of(one) or 0) <= taken]
                self._load_next(session)

    def _load_next(self, session: Session) -> None:
        self.states = self._next()
        with self.fitting():
            session.load_state_dict(self.states)

    def _trainer_state(self) -> TrainerState:
        """Return the state of the trainer; also from a checkpoint of a step of `parallelize`.

        Raises:
            ConfigError: the checkpoint has an impossible state.
        """
        metadata = self.metadata
        if metadata.trainer is None:
            samples = metadata.step * self._run.config.trainer.batch_size
            return TrainerState(step=metadata.step, samples=samples)
        return load(
            metadata.trainer,
            TrainerState,
            root="metadata.trainer",
            where=self._storage.place(self.states.checkpoint.name, MANIFEST_FILE),
            error=ConfigError,
        )

    @property
    def _place(self) -> str:
        return place_of(self._run, self._storage, self.states.checkpoint.name)

    def _next(self) -> ReadTogether:
        while self._names:
            try:
                checkpoint = Checkpoint(self._storage, self._names.pop(0))
            except DamagedError as error:
                self._skip(error)
                continue
            self._check(checkpoint.manifest.metadata, checkpoint.name)
            states = ReadTogether(checkpoint)
            states.call(self._own)
            return states
        raise none_is_whole(self._storage, self._num_given)

    def _skip(self, error: DamagedError) -> None:
        """Warn of a damaged checkpoint.

        Raises:
            DamagedError: it was the only one.
        """
        if self._num_given == 1:
            raise error
        self._skipped_last = words_of(error)
        where = f" ({error.where[0]})" if error.where else ""
        self._run.warn(f"{error.what}{where}; this checkpoint is skipped")

    def _check(self, metadata: Metadata, name: str) -> None:
        """Check that the run has the same seed; print other settings that differ.

        Raises:
            ConfigError: the seeds differ.
        """
        seed = self._run.config.trainer.seed
        if metadata.seed != seed:
            raise ConfigError(
                f"the checkpoint was saved with trainer.seed={metadata.seed}, and this run has "
                f"trainer.seed={seed}",
                where=self._storage.place(name),
                todo=f"trainer.seed={metadata.seed}",
            )
        now = settings_of(self._run)
        others = differences(metadata.settings, now)
        self._run.say([f"other than in {name}: {other}" for other in others])


def _form(value: Tensor) -> str:
    return f"{dtype_name(value)} {tuple(value.shape)}"
