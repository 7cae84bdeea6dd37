"""`TrainingStep`: trains a program on all ranks, with its plan and its states.

    TrainingStep(planned, engine, ...)     has a checked plan, and starts nothing
    start(), close(), or `with`            start and end the ranks
    step(batch)                            trains; step.evaluate(batch) changes no state
    save, load, load_model, state_dict     write, replace or return the states
    save_survivors                         saves them after a rank has failed

`parallelize` returns its subclass `ParallelStep`; the trainer of `sbp-train` uses the same class.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from sbp_core.errors import ConfigError, RunError
from sbp_core.runtime import Session
from sbp_launch.checkpoint.saving import Processes
from sbp_launch.checkpoint.starting_weights import find_weights, named_as_in
from sbp_launch.checkpoint.survivors import MEET_S
from sbp_launch.step.agreement import digest_of
from sbp_launch.step.buckets import Padding
from sbp_launch.step.comparison import OneDeviceComparison
from sbp_launch.step.engine import Engine
from sbp_launch.step.following import Following
from sbp_launch.step.joining import join
from sbp_launch.step.loading import load_states
from sbp_launch.step.neutral import prove_padding
from sbp_launch.step.planning import PlannedProgram, plan_program
from sbp_launch.step.program import OneDeviceProgram
from sbp_launch.step.program_step import ProgramStep
from sbp_launch.step.saved import StepSaves, as_path, load_step, processes_of
from sbp_launch.step.step_planner import PlanChoice
from sbp_launch.step.training import Training
from sbp_launch.team import Team
from sbp_torch.graph_capture import check_modes
from sbp_torch.interchange.torch_states import copy_to_model, to_model_state, to_optimizer_state


class TrainingStep(ProgramStep):
    """A training step on all ranks: call it with a batch, inside a `with` block.

    Several processes, one a rank, make the same calls in the same order.

    Args:
        planned: The planned program.
        choice: The planner, pins and further choices.
        engine: Starts the session.
        following: Reports whether the program has changed.
        training: Has the states.
        padding: The preparation of batches.
        states: Initial values of the states; the values of model and optimizer if None.
        comparison: Takes the first steps on one device, too.

    Attributes:
        world: This process among all: `step.world.rank == 0` is where one prints.
    """

    def __init__(
        self,
        planned: PlannedProgram,
        choice: PlanChoice,
        engine: Engine,
        following: Following,
        training: Training,
        padding: Padding,
        states: Mapping[str, Tensor] | None = None,
        comparison: OneDeviceComparison | None = None,
    ) -> None:
        super().__init__(planned, engine, following, training, padding, comparison)
        self._choice, self._given_states = choice, states
        self._beside: list[ProgramStep] = []
        self._is_over = False
        #: Set by `start`: the processes of the step, and the object that saves its states.
        self.processes = Processes()
        self._saves: StepSaves | None = None

    # Life cycle.

    def start(self, first: Mapping[str, Tensor] | None = None) -> Self:
        """Start the ranks, as `with` does. `close()` ends them.

        Args:
            first: Every state by name; may be a mapping that makes or reads values on demand. None
                for the given states, or those of the program.

        Raises:
            RunError: it was started before.
            ConfigError: the ranks have different programs; names the difference.
        """
        training = self._training
        if training.has_begun or self._is_over:
            raise RunError(
                "this parallel step was started before",
                accepted="one `with` block for each call of parallelize",
                todo="call parallelize again; step.state_dict() has the states, which it takes as "
                "states=...",
            )
        check_modes()
        backend = self._engine.make_backend()
        states, training.given = (first, {}) if first is not None else self._first_states()
        session = self._engine.runtime.start(self._planned.plan, states, backend)
        team = Team.of(backend, [part.rank for part in self._planned.plan.ranks])
        try:
            join(session, team, self._planned, self._engine, self._program, states)
        except BaseException as error:
            session.__exit__(type(error), error, error.__traceback__)
            raise
        self._given_states = None
        training.begin(session, backend, team)
        self.processes = processes_of(self.world, team, self._engine.elsewhere)
        self._saves = StepSaves(training.states, self._engine.seed, self.processes)
        training.after_step.append(self._saves.after_step)
        try:
            self._begin()
            training.connect()
            for one in self._beside:
                one._begin()
            training.keep({name: training.given[name] for name in self._frozen_states()})
            training.given = {}
        except BaseException as error:
            self._close(error)
            raise
        return self

    def _first_states(self) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
        """Return initial states of this program, and given ones of other programs, frozen layers.

        Raises:
            SbpLookupError: a value is given for a name that no state has.
        """
        given, states = self._given_states or {}, self._training.states
        own = set(states.names)
        others = {name for name in given if name not in own and name in states.all_names}
        others |= set(states.frozen_states(name for name in given if name not in own))
        later = {name: given[name] for name in given if name in others}
        if not later:
            return self._program.first_states(self._given_states), {}
        first = {name: one for name, one in given.items() if name not in later}
        return self._program.first_states(first), later

    def _frozen_states(self) -> list[str]:
        """Return the names of given states that no program has, because their layers are frozen."""
        states = self._training.states
        return [name for name in self._training.given if name not in set(states.names)]

    def close(self) -> None:
        """End the ranks. Safe to call twice; states on ranks of this process can still be read.

        Waits for the checkpoint that is being written, as the end of a `with` block does.

        Raises:
            RunError: it cannot be written.
        """
        self._close(None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        training = self._training
        if training.is_forked:
            return  # a child that was forked inside the block leaves this to its parent
        if error is None and training.has_begun and not self._is_over:
            for one in (self, *self._beside):
                one._forms.look_at_the_end()
        self._is_over = True
        training.end()
        with ExitStack() as closing:
            closing.enter_context(training.until_done())
            closing.callback(training.interrupts.__exit__)
            if training.has_begun:
                # An error that ends the block is reported to the ranks of other processes.
                kind = type(error) if error else None
                closing.callback(training.started.__exit__, kind, error, None)
                for one in (self, *self._beside):
                    closing.callback(one._close_sessions)
            if self._saves is not None:
                self._saves.end(error)

    @property
    def session(self) -> Session:
        """The started plan of the first program, whose ranks have all states.

        Raises:
            RunError: it is not started, or has lost its states in `load`.
        """
        return self._training.session

    # Programs.

    def _add_program(
        self,
        program: OneDeviceProgram,
        batch: Any,
        padding: Padding,
        choice: PlanChoice,
        engine: Engine,
    ) -> ProgramStep:
        """Plan another program on the same states, and start it if this step is started.

        Args:
            program: A program over the same model.
            batch: An example of the batch that a process gives to one of its steps.
            padding: The preparation of its batches.
            choice: The planner, pins and further choices.
            engine: Starts it.

        Raises:
            ConfigError: it conflicts with the programs that are there, or with the memory.
            SbpError: it cannot be captured or planned.
        """
        training = self._training
        with training.disconnected():
            training.states.check_optimizer(program)
        if all(program.optimizer is not one.optimizer for one in training.states.programs):
            training.optimizer_calls.watch(program.optimizer)
        following, example = Following(program), padding.largest(batch)
        with training.capturing(program):
            planned = plan_program(program, example, choice, engine, following, training)
            prove_padding(program, padding, engine.settings, None)
        if not program.trained & planned.captured.original.new_states.keys():
            raise ConfigError(
                "the loss gives no gradient to a parameter of the optimizer",
                where="the arguments loss and optimizer of step.add_step",
                accepted="an optimizer over parameters that the loss uses, and does not detach",
                todo="pass the optimizer of this loss",
            )
        if training.has_begun:
            training.compare_programs(planned.planned, engine.registry)
        made = ProgramStep(planned, engine, following, training, padding)
        try:
            if training.has_begun:
                made._begin()
        except BaseException:
            made._close_sessions()
            training.drop(program)
            raise
        self._beside.append(made)
        return made

    # States.

    @property
    def steps_done(self) -> int:
        """Number of steps taken, including steps before a `load`."""
        return self._training.steps_done

    @steps_done.setter
    def steps_done(self, value: int) -> None:
        self._training.first_step = value - self._training.num_steps

    def state_dict(self, *, to: int | None = None) -> dict[str, Tensor]:
        """Return every state as a whole tensor, a copy: parameters, buffers, optimizer states.

        Args:
            to: The rank whose process gets the states; all if None. Others get an empty dict.
        """
        return self._whole("state_dict", to)

    def _whole(self, call: str, to: int | None = None) -> dict[str, Tensor]:
        """Return every state as a whole tensor, for the given method of the user."""
        self._training.enter(f"step.{call}({'' if to is None else f'{to=}'})")
        return self._current.state_dict(to=to)

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace every state by the result of `state_dict`, possibly of another mesh."""
        training = self._training
        # From a file, each process reads the shards of its ranks.
        values = digest_of(states) if isinstance(states, dict) else "read"
        training.enter("step.load_state_dict(states)", {"the values of the states": values})
        with training.until_done():
            load_states(training, states)
            training.has_damaged_states = False
            training.note_replacement()

    def model_state_dict(self) -> dict[str, Any]:
        """Return a dict for `model.load_state_dict`: whole tensors on all ranks."""
        return to_model_state(self._whole("model_state_dict"), self._program.model)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return a dict for `optimizer.load_state_dict`: whole tensors on all ranks."""
        program, states = self._program, self._whole("optimizer_state_dict")
        with self._training.disconnected():
            return to_optimizer_state(states, program.model, program.optimizer)

    def copy_to(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Copy the trained states to a model, and to an optimizer over its parameters.

        Args:
            model: The model given to `parallelize`, or one with tensors of the same names and
                shapes, which have values. `torch.compile` and similar wrappers may differ.
            optimizer: The optimizer given to `parallelize`, or one over the given model.

        Raises:
            SbpLookupError: the model has a tensor that the step does not train.
            SbpValueError: a tensor has another shape, or no values.
        """
        states = self._whole("copy_to")
        if self._training.copied_to(states, model, optimizer):
            return
        named = named_as_in(states, model)
        copy_to_model(named, model)
        if optimizer is not None:
            optimizer.load_state_dict(to_optimizer_state(named, model, optimizer))

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Save a checkpoint in a folder, with strategy and plan; all processes call it.

        Each process writes the pieces that its ranks own, and nothing is sent. When this returns,
        the checkpoint is complete and on disk; if it fails, there is none. Older ones stay.

        After a step has failed because a process has ended, all surviving processes may call this.
        They save the states of the last complete step, if together they hold all of them.

        Args:
            folder: The folder; it is created if it does not exist.
            wait: If False, a thread writes the checkpoint from copies of the states while later
                steps run. It is complete after one of them, after `finish_saving`, or after the
                `with` block. The next `save` waits for it, and logs that.

        Raises:
            ConfigError: the folder is not a path.
            RunError: it cannot be written, or a part of the states is lost. Without `wait`, a later
                step (the same in all processes), `finish_saving`, the next `save` or the end of
                the block raises it.
        """
        session, training, place = self._current, self._training, as_path(folder, "step.save")
        assert self._saves is not None, "the step is started"
        backend = training.backend
        if backend is not None and backend.spans_processes and (why := backend.failure_reason()):
            left = backend.survivors(MEET_S)
            try:
                self._saves.save_survivors(place, session, self.steps_done, left)
            except RunError as error:
                where = (*error.where, f"a run that has failed: {why}")
                raise error.replaced(RunError, where=where) from error
            finally:
                left.leave()
            return
        training.enter(f"step.save(folder, {wait=})")
        self._saves.save(place, session, self.steps_done, wait=wait)

    def finish_saving(self) -> None:
        """Wait until the checkpoint of `save(..., wait=False)` is on disk; all processes call this.

        Raises:
            RunError: it cannot be written.
        """
        self._training.enter("step.finish_saving()")
        if self._saves is not None:
            self._saves.finish()

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint, possibly of another mesh; all processes call this.

        Each process reads and verifies the shards of its ranks, and replaces states one after the
        other. If steps were taken, all is read and verified once before that, so that a damaged
        checkpoint leaves the states unchanged. If none was taken, a damaged checkpoint leaves no
        states until others are loaded.

        Args:
            path: A checkpoint; or a folder of checkpoints, such as the folder of a run of
                `sbp-train`, of which the newest complete one is loaded. Damaged ones are skipped
                with a warning.

        Raises:
            ConfigError: there is none, or it is damaged, does not fit, or has another seed.
        """
        training, place = self._training, as_path(path, "step.load")
        training.enter("step.load(path)")
        if self._saves is not None:
            self._saves.finish()

        def replacing() -> None:
            training.has_damaged_states = True  # until all processes have read all their shards

        with training.until_done():
            done = load_step(
                place,
                training,
                self._engine.seed,
                self.processes,
                keeps=training.num_steps > 0 and not training.has_damaged_states,
                replacing=replacing,
            )
            training.has_damaged_states = False
            training.note_replacement()
            self.steps_done = done
        if self._comparison is not None:
            self._comparison.forget()

    def load_model(self, path: str | Path) -> None:
        """Start from weights, by the model's own names; all processes call it.

        Each process reads its ranks' parts of parameters and buffers. States of the optimizer keep
        their initial values; moving averages start with the weights that were read.

        Args:
            path: A checkpoint, a run folder, a file of safetensors, or a folder of Hugging Face or
                of `torch.distributed.checkpoint`. Either the file's names or the model's names may
                have an additional prefix, such as `model.`.

        Raises:
            ConfigError: there is nothing to load, a name is missing or unknown, or a shape differs.
            RunError: steps were taken, or the step is not started.
        """
        session, program = self.session, self._program
        if self.steps_done:
            raise RunError(
                f"weights are loaded before the first step; {self.steps_done} steps were taken",
                accepted="a parallel step before its first step",
                todo="call load_model first; step.load(folder) continues from a checkpoint",
            )
        self._training.enter("step.load_model(path)")
        weights = find_weights(
            path, program.model, program.optimizer, program.update, where="step.load_model"
        )
        with self._training.until_done():
            with self._training.disconnected(), weights.over(program.own_states()) as states:
                others = [one.own_states() for one in self._training.states.programs[1:]]
                session.load_state_dict(ChainMap(states, *others) if others else states)  # type: ignore[arg-type] # which only reads
            self._training.note_replacement()

    def __repr__(self) -> str:
        state = (
            "over" if self._is_over else "started" if self._training.has_begun else "not started"
        )
        return f"<ParallelStep on {self._engine.settings.mesh}, {state}>"
