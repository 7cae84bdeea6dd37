"""The parallel step: what `parallelize` returns, and what a training loop calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from rich.console import Console
from torch import Tensor, nn

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import RunError, SbpValueError
from sbp_core.graph import LogicalGraph
from sbp_core.runtime import BatchIs, Session, local_samples
from sbp_core.strategy import Strategy
from sbp_launch.checkpoint.starting_weights import find_weights
from sbp_launch.checkpoint.survivors import MEET_S
from sbp_launch.console import say
from sbp_launch.parallelize.agreement import Gather, compare_batches
from sbp_launch.parallelize.comparison import Comparison
from sbp_launch.parallelize.engine import Engine
from sbp_launch.parallelize.following import Following
from sbp_launch.parallelize.forms import Forms
from sbp_launch.parallelize.forward import Forwards
from sbp_launch.parallelize.joining import join
from sbp_launch.parallelize.output import StepOutput
from sbp_launch.parallelize.program import OneDeviceProgram
from sbp_launch.parallelize.saved import StepSaves, load_step, processes_of
from sbp_launch.parallelize.scalars import UpdateScalars
from sbp_launch.planning.output import print_plan
from sbp_launch.planning.source_lines import naming_source_lines
from sbp_launch.world import World
from sbp_torch.capture import flatten_batch
from sbp_torch.interchange.torch_states import to_model_state, to_optimizer_state
from sbp_torch.optim import note_step


class ParallelStep:
    """A training step on all ranks: call it with a batch, inside a `with` block.

    Made by `parallelize`. Several processes, one a rank, make the same calls in the same order.

    Attributes:
        world: This process among all: `step.world.rank == 0` is where one prints.
    """

    def __init__(
        self,
        program: OneDeviceProgram,
        forms: Forms,
        engine: Engine,
        degree: int,
        states: Mapping[str, Tensor] | None,
        following: Following,
        comparison: Comparison | None = None,
    ) -> None:
        self.world: World = engine.world
        self._program, self._forms, self._engine = program, forms, engine
        self._planned = planned = forms.first.planned
        self._given_states = states
        self._following, self._comparison = following, comparison
        self._forwards = Forwards(program, planned, engine, degree, following)
        self._session: Session | None = None
        self._backend: BoxingBackend | None = None
        self._first_step = self._num_steps = 0
        self._updates, self._is_over = True, False
        self._scalars = UpdateScalars(program.optimizer, program.update)
        #: Gathers texts of the ranks of other processes, between steps.
        self._gather: Gather | None = None
        self._has_compared = self._has_damaged_states = False
        self._saves: StepSaves | None = None

    # Life.

    def start(self) -> ParallelStep:
        """Start the ranks; `with` does it. To be ended by `close()`.

        Raises:
            RunError: it was started before.
            ConfigError: the ranks have different programs; names the difference.
        """
        if self._session is not None or self._is_over:
            raise RunError(
                "this parallel step was started before",
                accepted="one `with` block for each call of parallelize",
                todo="call parallelize again; step.state_dict() has the states, which it takes as "
                "states=...",
            )
        backend = self._engine.make_backend()
        states = self._program.first_states(self._given_states)
        session = self._engine.runtime.start(self._planned.plan, states, backend)
        try:
            self._gather = join(
                session, backend, self._planned, self._engine, self._program, states
            )
        except BaseException as error:
            session.__exit__(type(error), error, error.__traceback__)
            raise
        self._session, self._backend, self._given_states = session, backend, None
        processes = processes_of(self.world, self._gather)
        self._saves = StepSaves(
            self._planned, self._engine.seed, processes, self._program.optimizer
        )
        self._following.begin(session, backend, self._planned.plan, self._gather)
        self._forms.begin(session)
        return self

    def close(self) -> None:
        """End the ranks. Safe to call twice; what this process' ranks hold can still be read.

        Waits for the checkpoint that is being written, as the end of a `with` block does.

        Raises:
            RunError: it cannot be written.
        """
        self._close(None)

    def __enter__(self) -> ParallelStep:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self._is_over = True
        self._following.end()
        with ExitStack() as closing:
            if self._session is not None:
                # Ranks of other processes are told of an error that ends the block.
                closing.callback(
                    self._session.__exit__, type(error) if error else None, error, None
                )
            closing.callback(self._forms.close)
            closing.callback(self._forwards.close)
            if self._saves is not None:
                self._saves.end(error)

    @property
    def session(self) -> Session:
        """The started plan.

        Raises:
            RunError: it is not started, or has lost its states in `load`.
        """
        if self._has_damaged_states:
            raise RunError(
                "this parallel step has no states: those that it was to load are damaged",
                todo="load others: step.load(PATH), or step.load_state_dict(states)",
            )
        return self._started

    @property
    def _current(self) -> Session:
        """The started plan, with what was written to the model since the last step."""
        session = self.session
        self._following.take_over()
        return session

    @property
    def _started(self) -> Session:
        """The started plan, whatever became of its states."""
        if self._session is None:
            raise RunError(
                "this parallel step is not started",
                todo="use it in a `with` block: with parallelize(...) as step; or call start()",
            )
        return self._session

    # Steps.

    def __call__(self, batch: Any, /, **scalars: float) -> StepOutput:
        """Take one step: forward, backward and update of all micro-batches.

        Args:
            batch: Of the form and dtypes of the example given to `parallelize`. One of another
                shape is another form of the step, captured and planned when it is met first.
            scalars: Settings of the update for this step: `lr`, for all parameter groups, or
                `**{"lr.1": 0.1}` for one; and those of `UpdateOptions.scheduled`. What is left out
                is what the optimizer's groups say now, so schedulers of `torch.optim` just work.

        Raises:
            SbpValueError: the batch does not fit, or there is no such scalar.
            ConfigError: the processes are about to take different steps.
            RunError: a rank failed; what the loop has changed cannot be followed; or the step is
                not started, or over.
        """
        if not self._updates:
            if scalars:
                raise SbpValueError(
                    f"{next(iter(scalars))}= is a setting of the update, and step.no_update() "
                    "leaves that out"
                )
            return self._forward(batch, self._engine.batch_is, in_evaluation=False)
        flat = flatten_batch(batch)
        self.session  # noqa: B018 - raises if there is none
        values: dict[str, float] = {**self._scalars.now(scalars), **self._draws()}
        if self._gather is not None and not self._has_compared:
            compare_batches(self._forms.first.parts, flat, self._gather)
            self._has_compared = True
        form, values = self._forms.before_step(batch, values)
        assert form.session is not None, "the step is started"
        compared = self._comparison if self._comparison and self._comparison.is_due else None
        if compared is not None and not compared.has_begun:
            first = self.state_dict(to=0)
            with self._following.apart():
                compared.begin(first, self.steps_done)
        with naming_source_lines(form.planned.graph):
            found = form.session.step(flat, values, batch_is=self._engine.batch_is)
        self._num_steps += 1
        if compared is not None:
            compared.step(batch, float(found.loss), values)
        self._following.behind_step()
        note_step(self._program.optimizer)
        assert self._saves is not None, "the step is started"
        self._saves.behind_step()
        return StepOutput.of(found)

    def evaluate(self, batch: Any, /, *, batch_is: BatchIs | None = None) -> StepOutput:
        """Return loss and metrics of a batch in evaluation mode; nothing changes.

        Args:
            batch: Of any size. The first one of each size is captured and planned.
            batch_is: What this process passes, if not what it passes to training steps.
        """
        return self._forward(batch, batch_is or self._engine.batch_is, in_evaluation=True)

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Let steps inside the `with` block return their loss and change nothing.

        The model stays in the mode in which it trains. Gradients are not accumulated over steps: a
        plan is one whole step, with the update in it, and `micro_batches=` accumulates inside it.
        """
        before, self._updates = self._updates, False
        try:
            yield
        finally:
            self._updates = before

    def _forward(self, batch: Any, batch_is: BatchIs, *, in_evaluation: bool) -> StepOutput:
        result = self._forwards.step(
            self._current,
            batch,
            self._draws(),
            batch_is=batch_is,
            in_evaluation=in_evaluation,
            gather=self._gather,
        )
        return StepOutput.of(result)

    def _draws(self) -> dict[str, float]:
        """Return what random numbers are counted with."""
        return {"seed": self._engine.seed, "step": self.steps_done}

    @property
    def data_parallel_size(self) -> int:
        """Parts of a batch that processes load: `num_replicas` of a `DistributedSampler`.

        Raises:
            SbpValueError: the ranks hold other samples of one batch tensor than of another.
        """
        if self.world.size == 1:
            return 1
        plan = self._planned.plan
        held = (sum(map(len, local_samples(plan, [part.rank]))) for part in plan.ranks)
        of = next((part.of for part in self._forms.first.parts.values() if part.shape), 1)
        return of // max(held, default=of)

    @property
    def data_parallel_rank(self) -> int:
        """Which part this process loads: `rank` of a `DistributedSampler`.

        Processes that hold the same samples, along an axis `tensor`, load the same part; one that
        reads no batch, in the middle of a pipeline, may load any.
        """
        samples = local_samples(self._planned.plan, self._engine.ranks)
        return samples[0].start // len(samples[0]) if samples else 0

    # States.

    @property
    def steps_done(self) -> int:
        """Steps taken, those before a `load` included."""
        return self._first_step + self._num_steps

    def state_dict(self, *, to: int | None = None) -> dict[str, Tensor]:
        """Return every state as a whole tensor, a copy: parameters, buffers, optimizer states.

        Args:
            to: The rank whose process gets them; all if None. Elsewhere there are none.
        """
        return self._current.state_dict(to=to)

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace every state by what `state_dict` returned, perhaps of another mesh."""
        self._started.load_state_dict(states)
        self._has_damaged_states = False
        self._following.replaced()

    def model_state_dict(self) -> dict[str, Any]:
        """Return what `model.load_state_dict` takes: whole tensors on all ranks."""
        return to_model_state(self.state_dict(), self._program.model)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return what `optimizer.load_state_dict` takes: whole tensors on all ranks."""
        program, states = self._program, self.state_dict()
        with self._following.apart():
            return to_optimizer_state(states, program.model, program.optimizer)

    def copy_to(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what was trained into a model, and into an optimizer over its parameters.

        Args:
            model: Of the same form, with values: the one given to `parallelize`, or another.
            optimizer: Likewise.
        """
        states = self.state_dict()
        if self._following.copied_to(states, model, optimizer):
            return
        model.load_state_dict(to_model_state(states, model))
        if optimizer is not None:
            optimizer.load_state_dict(to_optimizer_state(states, model, optimizer))

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Save a checkpoint in a folder, and strategy and plan beside it; all processes call it.

        Each process writes what its ranks own, and nothing is sent. The checkpoint is whole and on
        the disk when this returns, or it is not there; those of other steps stay.

        Behind a step that has failed because a process has ended, those that are left call it: they
        save the states of the last whole step if they hold all of them, as with data parallelism.

        Args:
            folder: Is made if it is not there.
            wait: If not, a thread writes the checkpoint while later steps run, from copies of the
                states; it is there behind one of them, or when `finish_saving` or the `with` block
                is through. The next `save` waits for it, and logs that.

        Raises:
            RunError: it cannot be written, or a part of the states is lost. Without `wait`, a later
                step raises that, in all processes the same one, or `finish_saving`, the next `save`
                or the end of the block.
        """
        session = self._current
        assert self._saves is not None, "the step is started"
        backend = self._backend
        if backend is not None and backend.spans_processes and backend.failure_reason():
            left = backend.survivors(MEET_S)
            try:
                self._saves.save_left(Path(folder), session, self.steps_done, left)
            finally:
                left.leave()
            return
        self._saves.save(Path(folder), session, self.steps_done, wait=wait)

    def finish_saving(self) -> None:
        """Wait until what `save(..., wait=False)` saves is on the disk; all processes call it.

        Raises:
            RunError: it cannot be written.
        """
        if self._saves is not None:
            self._saves.finish()

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, perhaps of another mesh; all processes call it.

        Each process reads, and verifies, what its ranks hold; states are replaced one after the
        other. Before that, of a step that has been taken, all is read and verified once: if it is
        damaged, the states are as they were. Without a step taken there are none then, until others
        are loaded.

        Args:
            path: Of a checkpoint; or of a folder that has some, such as that of a run of
                `sbp-train`, of which the newest is taken that is whole. Those that are damaged are
                passed over, with a warning.

        Raises:
            ConfigError: there is none, it is damaged, does not fit, or was saved with another seed.
        """
        self.finish_saving()
        session = self._started

        def replacing() -> None:
            self._has_damaged_states = True  # until all processes have read theirs whole

        done = load_step(
            Path(path),
            session,
            self._engine.seed,
            processes_of(self.world, self._gather),
            self._program.optimizer,
            keeps=self._num_steps > 0 and not self._has_damaged_states,
            replacing=replacing,
        )
        self._has_damaged_states = False
        self._following.replaced()
        self._first_step = done - self._num_steps
        if self._comparison is not None:
            self._comparison.forget()

    def load_model(self, path: str | Path) -> None:
        """Start from weights, by the model's own names; all processes call it.

        Each process reads its ranks' parts of parameters and buffers. States of the optimizer are
        as before the first step; moving averages begin with what was read.

        Args:
            path: A checkpoint, a run folder, a file of safetensors, or a folder of Hugging Face or
                of `torch.distributed.checkpoint`. Names may have one more beginning, such as
                `model.`, there or in the model.

        Raises:
            ConfigError: there is nothing there; a name is missing or unknown, or a shape another.
            RunError: steps were taken, or it is not started.
        """
        session, program = self.session, self._program
        if self.steps_done:
            raise RunError(
                f"{self.steps_done} steps were taken, and weights are what a run starts from",
                accepted="a parallel step before its first step",
                todo="call load_model first; step.load(folder) goes on from a checkpoint",
            )
        weights = find_weights(
            path, program.model, program.optimizer, program.update, where="step.load_model"
        )
        with self._following.apart(), weights.over(program.own_states()) as states:
            session.load_state_dict(states)
        self._following.replaced()

    # The plan.

    @property
    def forms(self) -> tuple[PhysicalPlan, ...]:
        """The plans of all forms of the step, as they were met; the first is `plan`."""
        return self._forms.plans

    @property
    def graph(self) -> LogicalGraph:
        """The captured step."""
        return self._planned.graph

    @property
    def strategy(self) -> Strategy:
        """How every tensor is stored and every operator split."""
        return self._planned.strategy

    @property
    def plan(self) -> PhysicalPlan:
        """What every rank runs."""
        return self._planned.plan

    def report(self, file: TextIO | None = None, *, max_rows: int = 30) -> None:
        """Print the plan as `sbp-plan` does: layouts, what is sent, time, memory. On rank 0 only.

        With what was proved of it; and, after the steps that are compared with one device, how far
        they are off.

        Args:
            file: Where; standard output if None.
            max_rows: Most rows of its table; 0 for no table.
        """
        if self.world.rank != 0:
            return
        out = file or sys.stdout
        console = Console(file=out, width=None if out.isatty() else 100)
        mesh = self._engine.settings.mesh
        sizes = dict(zip(mesh.axes, mesh.mesh_shape, strict=True))
        print_plan(console, self._planned, sizes, max_rows, "raise max_rows to see them")
        say(console, self._comparison.lines() if self._comparison else [])

    def __repr__(self) -> str:
        state = "over" if self._is_over else "not started" if self._session is None else "started"
        return f"<ParallelStep on {self._engine.settings.mesh}, {state}>"
