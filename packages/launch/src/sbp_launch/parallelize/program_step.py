"""The step of one program: what a training loop calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import CaptureError, RunError, SbpTypeError, SbpValueError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.output import legible
from sbp_core.runtime import BatchIs, Session, local_samples
from sbp_core.strategy import Strategy
from sbp_launch.console import make_console, say
from sbp_launch.parallelize.agreement import compare_batches
from sbp_launch.parallelize.batch_names import check_batch_names
from sbp_launch.parallelize.buckets import Padding
from sbp_launch.parallelize.comparison import Comparison
from sbp_launch.parallelize.engine import Engine
from sbp_launch.parallelize.flow import PlannedProgram
from sbp_launch.parallelize.following import Following
from sbp_launch.parallelize.forms import Forms
from sbp_launch.parallelize.forward import Forwards
from sbp_launch.parallelize.interrupts import until_done
from sbp_launch.parallelize.missing_attributes import OF_STEPS_BESIDE, missing_attribute
from sbp_launch.parallelize.neutral import prove_padding
from sbp_launch.parallelize.output import StepOutput
from sbp_launch.parallelize.scalars import UpdateScalars
from sbp_launch.parallelize.training import Training
from sbp_launch.planning.output import print_plan
from sbp_launch.planning.source_lines import naming_source_lines
from sbp_launch.world import World
from sbp_torch.capture import flatten_batch
from sbp_torch.optim import note_step


class ProgramStep:
    """A training step of one program, on the states of a `ParallelStep`: call it with a batch.

    Made by `ParallelStep.beside`. Several processes, one a rank, make the same calls in the same
    order.

    Attributes:
        world: This process among all: `step.world.rank == 0` is where one prints.
    """

    def __init__(
        self,
        planned: PlannedProgram,
        engine: Engine,
        following: Following,
        training: Training,
        padding: Padding,
        comparison: Comparison | None = None,
    ) -> None:
        self.world: World = engine.world
        program = planned.capture.program
        self._program, self._engine, self._training = program, engine, training
        self._planned = planned.planned
        self._following, self._padding, self._comparison = following, padding, comparison
        given = training.given or None
        prove = partial(prove_padding, program, padding, planned.capture.settings, given)
        number = len(training.states.programs)
        self._forms = Forms(planned, engine, following, training, number, prove)
        self._forwards = Forwards(
            program, planned.planned, engine, planned.capture.degree, following, training, prove
        )
        self._forwards.most_forms = max(self._forwards.most_forms, padding.num_sizes)
        training.add(program, planned.planned, self._forms.count_apart)
        self._updates = True
        self._scalars = UpdateScalars(program.optimizer, program.update)
        self._has_compared = False

    @property
    def _current(self) -> Session:
        """The started plan, with what was written to the model since the last step."""
        session = self._training.session
        self._following.look()
        self._following.take_over(self._training)
        return session

    def _begin(self) -> None:
        """Start the step, as there is a session that has the states."""
        self._forms.begin()
        self._padding.begin(self._training.team)
        self._forms.plan_ahead(self._padding.examples())

    def _close_sessions(self) -> None:
        self._forms.close()
        self._forwards.close()

    if not TYPE_CHECKING:  # so that type checkers know what there is, and that `with` is wrong

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, OF_STEPS_BESIDE)

        def __enter__(self) -> NoReturn:
            raise RunError(
                "a step that step.beside returned cannot be entered by `with`",
                accepted="the first step, which parallelize returned",
                todo="leave out this `with`: that of the first step starts and ends all steps",
            )

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None:
            """Do nothing: it is not entered."""

    # Steps.

    def __call__(self, batch: Any, /, *more: Any, **scalars: float) -> StepOutput:
        """Take one step: forward, backward and update of all micro-batches.

        Args:
            batch: Of the form and dtypes of the example given to `parallelize`. One of another
                shape is another form of the step, captured and planned when it is met first;
                with `pad_to`, it is padded first.
            more: Refused: a batch of several tensors is one argument, such as a tuple.
            scalars: Settings of the update for this step: `lr`, for all parameter groups, or
                `**{"lr.1": 0.1}` for one; and those of `UpdateOptions.scheduled`. What is left out
                is what the optimizer's groups say now, so schedulers of `torch.optim` just work.

        Raises:
            SbpTypeError: there is more than one argument that has no name.
            SbpValueError: the batch does not fit, or there is no such scalar.
            ConfigError: the processes are about to take different steps.
            RunError: a rank failed; what the loop has changed cannot be followed; or the step is
                not started, or over.
            KeyboardInterrupt: Ctrl-C, once the step is done; see `interrupts`.
        """
        if more:
            raise SbpTypeError(
                f"a step takes one batch, and {1 + len(more)} arguments were given",
                todo="in the form of the example, such as step((x, y)) or step({'x': x, 'y': y})",
            )
        if not self._updates:
            if scalars:
                raise SbpValueError(
                    f"{next(iter(scalars))}= is a setting of the update, and step.no_update() "
                    "leaves that out"
                )
            return self._forward(batch, self._engine.batch_is, in_evaluation=False)
        training = self._training
        training.session  # noqa: B018 - raises if there is none
        training.check_open()
        is_first = training.gather is not None and not self._has_compared
        if is_first or self._padding.num_sizes:  # which send something before the step agrees
            training.enter(self._forms.call)
        batch = self._padding(batch, self._engine.batch_is)
        flat = flatten_batch(batch)
        values: dict[str, float] = {**self._scalars.now(scalars), **self._draws()}
        if is_first:
            assert training.gather is not None, "there are other processes"
            compare_batches(self._forms.first.parts, flat, training.gather)
            self._has_compared = True
        form, values = self._forms.before_step(batch, values)
        check_batch_names(flat, self._batch_names)
        assert form.session is not None, "the step is started"
        compared = self._comparison if self._comparison and self._comparison.is_due else None
        if compared is not None and not compared.has_begun:
            first = self._current.state_dict(to=0)
            with training.apart():
                compared.begin(first, training.steps_done)
        with until_done():
            before = form.session.steps_done
            try:
                with naming_source_lines(form.planned.graph):
                    found = form.session.step(flat, values, batch_is=self._engine.batch_is)
            finally:
                if form.session.steps_done > before:  # else it was given up, or has failed
                    training.behind_step(form.planned.graph)
                    note_step(self._program.optimizer)
            if compared is not None:
                compared.step(batch, float(found.loss), values)
            assert training.saves is not None, "the step is started"
            training.saves.behind_step()
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
        self._training.check_open()
        call = "step.evaluate(batch)" if in_evaluation else "step(batch) inside step.no_update()"
        self._training.enter(call)
        try:
            result = self._forwards.step(
                self._current,
                self._padding(batch, batch_is),
                self._draws(),
                batch_is=batch_is,
                in_evaluation=in_evaluation,
                call=call,
            )
        except (CaptureError, SbpValueError):
            # A loss may read batches of other forms. If it does not, that is the reason.
            check_batch_names(flatten_batch(batch), self._batch_names)
            raise
        return StepOutput.of(result)

    @property
    def _batch_names(self) -> list[str]:
        """The names of the tensors of the example."""
        inputs = self._planned.graph.inputs
        return [one.name for one in inputs if one.kind is InputKind.BATCH]

    def _draws(self) -> dict[str, float]:
        """Return what random numbers are counted with."""
        return {"seed": self._engine.seed, "step": self._training.steps_done}

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
        out = file or sys.stdout
        if self.world.rank != 0 or out is None:  # None where a process has no standard output
            return
        console = make_console(file=out)
        mesh = self._engine.settings.mesh
        sizes = dict(zip(mesh.axes, mesh.mesh_shape, strict=True))
        with console.capture() as captured:
            print_plan(console, self._planned, sizes, max_rows, "raise max_rows to see them")
            say(console, self._padding.lines)
            say(console, self._comparison.lines() if self._comparison else [])
        out.write(legible(captured.get(), out))
