"""Where a run goes on: the newest checkpoint that is whole, and what is other than it was."""

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
    """Where a run goes on: the newest checkpoint that is whole, of those that it may take.

    Attributes:
        states: What a session is started with, in parts.

    Args:
        run: The run.
        storage: Of the checkpoints.
        names: Those to try, one after the other.

    Raises:
        ConfigError: none of them has a whole manifest, or another seed than the run.
    """

    def __init__(self, run: Run, storage: CheckpointStorage, names: list[str]) -> None:
        self._run, self._storage, self._names = run, storage, list(names)
        self._num_given = len(names)
        #: What was said of the checkpoint that was passed over last.
        self._skipped_last = ""
        #: What the run calls its states.
        self._own: Collection[str] = ()
        self.states = self._next()

    @classmethod
    def of(cls, run: Run, storage: CheckpointStorage) -> Resume | None:
        """Return where a run goes on as `trainer.resume` says; None if it begins.

        Raises:
            ConfigError: it is to go on, and there is no checkpoint that is whole.
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
        """Where the run was."""
        return self.states.checkpoint.manifest.metadata

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Say of states that do not fit in the block which checkpoint they are of.

        Raises:
            ConfigError: they do not.
        """
        try:
            yield
        except SbpValueError as error:
            raise self._misfit(error.what, error.where, error.accepted) from error

    def check_data(self, order: SampleOrder) -> None:
        """See that the run goes on in the data, and in the order, in which it was.

        With `trainer.allow_other_data` it goes on in others, and says so.

        Raises:
            ConfigError: it would not.
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
        """See that the checkpoint has the states that a run begins with; before it is planned.

        Raises:
            ConfigError: one is missing, unknown, or of another shape or dtype.
        """
        own = program.made.states(program.optimizer, self._run.config.trainer.update)
        self._own = own.keys()
        self.states.call(self._own)
        saved = {name: self.states.like(name) for name in self.states.names}
        found = []
        for name, value in program.model.named_parameters():
            was = saved.get(name)
            if was is not None and (was.dtype, was.shape) != (value.dtype, value.shape):
                found.append(f"{name!r} is {_form(was)} there, and {_form(value)} here")
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
        """See that all processes have read all of a checkpoint; take the next one if not.

        Returns:
            Where the trainer was.

        Raises:
            ConfigError: none is whole.
        """
        self._follow_others(session, processes)
        while (problem := self.states.agree(processes)) is not None:
            self._skip(problem)
            self._load_next(session)
            self._follow_others(session, processes)
        self._run.say([f"going on after step {self.metadata.step}, from {self._place}"])
        return self._trainer_state()

    def _follow_others(self, session: Session, processes: Processes) -> None:
        """Take the checkpoint that the others have, if these have found a newer one damaged.

        Each process has opened what was whole for it, by itself: before the session, nobody can be
        asked. Where they differ for another reason, `ReadTogether.agree` says so.

        Raises:
            ConfigError: none is whole.
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
        """Return where the trainer was; of a step of `parallelize`, as if it had been this one.

        Raises:
            ConfigError: the checkpoint says what cannot be.
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
            DamagedError: there was no other.
        """
        if self._num_given == 1:
            raise error
        self._skipped_last = words_of(error)
        where = f" ({error.where[0]})" if error.where else ""
        self._run.warn(f"{error.what}{where}; it is passed over")

    def _check(self, metadata: Metadata, name: str) -> None:
        """See that the run draws the same random numbers; tell what else is other.

        Raises:
            ConfigError: it does not.
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
