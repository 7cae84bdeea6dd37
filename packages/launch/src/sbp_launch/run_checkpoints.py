"""The checkpoints of a run: when it saves, where it goes on from, what it says of that."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

from torch import Tensor
from xxhash import xxh3_128_hexdigest

from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.graph import graph_hash
from sbp_core.plugins import Storage, TrainerState
from sbp_core.runtime import Session
from sbp_core.serialize import dump, load
from sbp_launch.checkpoint.background import BackgroundSave, BackgroundSaves
from sbp_launch.checkpoint.local import MANIFEST_FILE
from sbp_launch.checkpoint.manifest import DamagedError, Metadata
from sbp_launch.checkpoint.places import AUTO, find_checkpoints, newest_first, step_name
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.saving import Processes, ReadTogether, prune, remove, save
from sbp_launch.data import DataCursor, SampleOrder
from sbp_launch.environment import versions
from sbp_launch.planning import Planned
from sbp_launch.run import Run
from sbp_launch.team import Team

#: What is kept of a run whose loss is no number, apart from the checkpoints to go on from.
_NOT_FINITE = "not-finite"


def run_storage(run: Run) -> Storage:
    """Return where a run keeps its checkpoints; nothing is made there yet."""
    storage: Storage = run.make("storage")(run.folder)
    return storage


def claimed(run: Run, storage: Storage) -> AbstractContextManager[None]:
    """Keep other runs from writing to the storage inside the block; the first process does."""
    return storage.claim() if run.is_first else nullcontext()


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

    def __init__(self, run: Run, storage: Storage, names: list[str]) -> None:
        self._run, self._storage, self._names = run, storage, list(names)
        self._num_tried = 0
        self.states = self._next()

    @classmethod
    def of(cls, run: Run, storage: Storage) -> Resume | None:
        """Return where a run goes on as `trainer.resume` says; None if it begins.

        Raises:
            ConfigError: it is to go on, and there is no checkpoint that is whole.
        """
        wanted = run.config.trainer.resume
        if wanted is None:
            return None
        if wanted != AUTO:
            found, names = find_checkpoints(wanted)
            return cls(run, found, names[:1])
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
            raise ConfigError(
                f"the checkpoint does not fit this model and optimizer: {error.what}",
                where=(*error.where, self._place),
                accepted=error.accepted,
                todo="choose the model, optimizer and update options of the run that saved it",
            ) from error

    def check_data(self, order: SampleOrder) -> None:
        """See that the run goes on in the data, and in the order, in which it was.

        Raises:
            ConfigError: it would not.
        """
        if self.metadata.cursor is not None:
            where = self._storage.place(self.states.checkpoint.name, MANIFEST_FILE)
            cursor = DataCursor.from_json(self.metadata.cursor, where=where)
            cursor.check_same_data(order, where=where)

    def agree(self, session: Session, processes: Processes) -> TrainerState:
        """See that all processes have read all of a checkpoint; take the next one if not.

        Returns:
            Where the trainer was.

        Raises:
            ConfigError: none is whole.
        """
        while (problem := self.states.agree(processes)) is not None:
            self._skip(problem)
            self.states = self._next()
            with self.fitting():
                session.load_state_dict(self.states)
        self._run.say([f"going on after step {self.metadata.step}, from {self._place}"])
        return self._trainer_state()

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
        return _place(self._run, self._storage, self.states.checkpoint.name)

    def _next(self) -> ReadTogether:
        while self._names:
            self._num_tried += 1
            try:
                checkpoint = Checkpoint(self._storage, self._names.pop(0))
            except DamagedError as error:
                self._skip(error)
                continue
            self._check(checkpoint.manifest.metadata, checkpoint.name)
            return ReadTogether(checkpoint)
        raise ConfigError(
            f"none of the {self._num_tried} checkpoints is whole",
            where=self._storage.place(),
            accepted="a checkpoint that verifies",
            todo="begin anew without trainer.resume, in another folder",
        )

    def _skip(self, error: DamagedError) -> None:
        """Warn of a damaged checkpoint.

        Raises:
            DamagedError: it is the one that the user has named.
        """
        if self._run.config.trainer.resume != AUTO:
            raise error
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
        others = [
            f"{key} was {_shown(was)}, and is {_shown(now.get(key))}"
            for key, was in metadata.settings.items()
            if now.get(key) != was
        ]
        self._run.say([f"other than in {name}: {other}" for other in others])


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
        storage: Storage,
        processes: Processes,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._storage, self._processes = run, storage, processes
        self._settings, self._clock, self._last_s = run.config.trainer.checkpoint, clock, clock()
        resumed_here = run.config.trainer.resume == AUTO
        self._saved_step = first_step if resumed_here and first_step else -1
        self._graph_hash = graph_hash(planned.graph)
        self._config_hash = _hash(asdict(run.config))
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
        self.finish()
        name = step_name(state.step) if is_finite else f"{_NOT_FINITE}-{state.step:08d}"
        place = _place(self._run, self._storage, name)
        if state.step == self._saved_step:
            return place
        metadata = self._metadata(state, cursor)
        save(self._storage, name, metadata, session.pieces(), self._processes)
        self._last_s = self._clock()
        if is_finite:
            self._saved_step = state.step
            if self._processes.is_first:
                self._remove_others(name, state)
        return place

    def begin(
        self,
        session: Session,
        state: TrainerState,
        cursor: DataCursor,
        tell: Callable[[str], None],
    ) -> None:
        """Begin to save what a session has, which is written while it goes on; all processes call.

        From then on, they tell each other behind each step whether one `is_busy`, and call
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
            tell(f"waiting until {_place(self._run, self._storage, self._saves.name)} is there")
            self.finish()
        if state.step == self._saved_step:
            return
        name = step_name(state.step)
        self._saving_step, self._last_s = state.step, self._clock()
        self._saves.begin(
            BackgroundSave(
                self._storage,
                name,
                self._metadata(state, cursor),
                session.snapshot(),
                self._processes,
                behind_commit=lambda: self._remove_others(name, state),
            )
        )

    @property
    def is_busy(self) -> bool:
        """Whether this process writes."""
        return self._saves.is_busy

    def go_on(self) -> None:
        """Go on with the checkpoint that is under way, if there is one, as no process is busy.

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
        """Remove checkpoints that are not to be kept beside a new one."""
        kept = [] if state.best_step is None else [step_name(state.best_step)]
        remove(self._storage, [one for one in self._earlier if one != name])
        self._earlier = []
        prune(self._storage, self._settings.keep, kept)

    @property
    def newest(self) -> str:
        """Where the checkpoint is that was saved last, for people; empty if none was."""
        if self._saved_step < 0:
            return ""
        return _place(self._run, self._storage, step_name(self._saved_step))

    def read(self, names: set[str]) -> Mapping[str, Tensor]:
        """Return states of the checkpoint that was saved last, whole."""
        with Checkpoint(self._storage, step_name(self._saved_step)) as checkpoint:
            return {name: checkpoint[name] for name in checkpoint if name in names}


def processes_of(run: Run, team: Team) -> Processes:
    """Return the processes of a run, as checkpoints know them."""
    if run.world.size == 1:
        return Processes(gather=team.gather)
    return Processes(rank=run.world.rank, ranks=tuple(range(run.world.size)), gather=team.gather)


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings that a run should share with the one that it goes on from, as JSON."""
    config, trainer = run.config, run.config.trainer
    values = {
        "model": _choice(config.model),
        "data": _choice(config.data),
        "optimizer": _choice(config.optimizer),
        "trainer.batch_size": trainer.batch_size,
        "trainer.schedule": asdict(trainer.schedule),
        "trainer.update": asdict(trainer.update),
    }
    if trainer.schedule.decay != "constant":
        values["trainer.budget"] = asdict(trainer.budget)
    found: dict[str, Any] = json.loads(_text(values))
    return found


def _place(run: Run, storage: Storage, name: str) -> str:
    """Return where a checkpoint is: relative to the run folder, if it is there."""
    return storage.place(name).removeprefix(f"{run.folder}/")


def _choice(choice: Any) -> dict[str, Any]:
    return {"name": choice.name, **choice.settings}


def _text(value: Any) -> str:
    # JSON has no infinities: `norm_type` may be one.
    return json.dumps(_finite(value), sort_keys=True, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return value


def _hash(value: Any) -> str:
    return xxh3_128_hexdigest(_text(value).encode())


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
