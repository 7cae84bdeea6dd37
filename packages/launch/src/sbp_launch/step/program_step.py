"""`ProgramStep`: the base of parallel training steps, which a loop calls with each batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import CaptureError, RunError, SbpTypeError, SbpValueError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.output import legible
from sbp_core.runtime import BatchIs, NotFiniteStepError, Session, local_samples
from sbp_core.strategy import Strategy
from sbp_launch.console import make_console, say
from sbp_launch.explaining.output import print_plan
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.source_lines import naming_source_lines
from sbp_launch.step.agreement import compare_batches
from sbp_launch.step.batch_names import check_batch_names
from sbp_launch.step.buckets import Padding
from sbp_launch.step.comparison import OneDeviceComparison
from sbp_launch.step.engine import Engine
from sbp_launch.step.first_bad_value import UndoneStepError, first_bad_value
from sbp_launch.step.following import Following
from sbp_launch.step.forms import Forms, StepForm
from sbp_launch.step.forward import Forwards, Mode
from sbp_launch.step.missing_attributes import OF_ADDED_STEPS, missing_attribute
from sbp_launch.step.neutral import prove_padding
from sbp_launch.step.planning import PlannedProgram
from sbp_launch.step.scalars import UpdateScalars
from sbp_launch.step.step_output import StepOutput
from sbp_launch.step.training import Training
from sbp_launch.team import Team
from sbp_launch.world import World
from sbp_torch.graph_capture import flatten_batch
from sbp_torch.optim import note_step


class ProgramStep:
    """A training step of one program, on the states of a `ParallelStep`: call it with a batch.

    Made by `ParallelStep.add_step`. Several processes, one a rank, make the same calls in the same
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
        comparison: OneDeviceComparison | None = None,
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
    def only_finite(self) -> bool:
        """Whether a step whose loss or gradients are infinite or NaN is undone, and raises."""
        return self._training.only_finite

    @only_finite.setter
    def only_finite(self, value: bool) -> None:
        self._training.only_finite = value

    @property
    def planned(self) -> Planned:
        """The plan of the first form, with its graph, strategy and proof."""
        return self._planned

    @property
    def team(self) -> Team:
        """The processes of the step, after it is started."""
        return self._training.team

    @property
    def scalars(self) -> dict[str, float]:
        """The present values of the optimizer's settings that may change from step to step."""
        return self._scalars.now({})

    @property
    def _current(self) -> Session:
        """The started session, after copying values written to the model since the last step."""
        session = self._training.session
        self._following.look()
        self._following.take_over(self._training)
        return session

    def _begin(self) -> None:
        """Start the step, after the session that has the states was started."""
        self._forms.begin()
        self._padding.begin(self._training.team)
        self._forms.plan_ahead(self._padding.examples())

    def _close_sessions(self) -> None:
        self._forms.close()
        self._forwards.close()

    if not TYPE_CHECKING:  # type checkers see only the real attributes, and reject `with`

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, OF_ADDED_STEPS)

        def __enter__(self) -> NoReturn:
            raise RunError(
                "a step that step.add_step returned cannot be entered by `with`",
                accepted="the first step, which parallelize returned",
                todo="leave out this `with`: the `with` of the first step starts and ends all "
                "steps",
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
            batch: A batch with the structure and dtypes of the example given to `parallelize`. A
                batch of another shape needs another form of the step, which is captured and
                planned at its first batch. With `pad_to`, batches are padded first.
            more: Refused: a batch of several tensors is one argument, such as a tuple.
            scalars: Settings of the update for this step: `lr` for all parameter groups,
                `**{"lr.1": 0.1}` for one; and settings in `UpdateOptions.scheduled`. The others are
                read from the optimizer's groups, so schedulers of `torch.optim` just work.

        Raises:
            SbpTypeError: there is more than one positional argument.
            SbpValueError: the batch does not fit, or there is no such scalar.
            ConfigError: the processes are about to take different steps.
            RunError: a rank failed; a change that the loop made cannot be followed; or the step is
                not started, or over.
            UndoneStepError: with `only_finite`, the loss or the gradients are infinite or NaN. No
                state has changed. The error names the operator that made the first such value.
            KeyboardInterrupt: Ctrl-C, after the step is done; see `interrupts`.
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
            return self._forward(batch, self._engine.batch_is, Mode.TRAINING)
        training = self._training
        training.session  # noqa: B018 - raises if there is none
        training.check_open()
        is_first = not training.team.is_alone and not self._has_compared
        if is_first or self._padding.num_sizes:  # these send something before `agree`
            training.enter(self._forms.call)
        batch = self._padding(batch, self._engine.batch_is)
        flat = flatten_batch(batch)
        values: dict[str, float] = {**self._scalars.now(scalars), **self._draws()}
        if is_first:
            compare_batches(self._forms.first.parts, flat, training.team.gather)
            self._has_compared = True
        form, values = self._forms.before_step(batch, values)
        check_batch_names(flat, self._batch_names)
        assert form.session is not None, "the step is started"
        compared = self._comparison if self._comparison and self._comparison.is_due else None
        if compared is not None and not compared.has_begun:
            first = self._current.state_dict(to=0)
            with training.disconnected():
                compared.begin(first, training.steps_done)
        with training.until_done():
            before = form.session.steps_done
            try:
                with naming_source_lines(form.planned.graph):
                    batch_is = self._engine.batch_is
                    take = partial(form.session.step, flat, values, batch_is=batch_is)
                    form.session.only_finite = training.only_finite
                    found = self._engine.measuring(form.session, take)
            except NotFiniteStepError as error:
                raise self._undone(error, form, flat, values) from error
            finally:
                if form.session.steps_done > before:  # otherwise it was aborted, or has failed
                    training.note_step(form.planned.graph)
                    note_step(self._program.optimizer)
            if compared is not None:
                compared.step(lambda: batch, float(found.loss), values)
            for after in training.after_step:
                after()
        return StepOutput.of(found)

    def _undone(
        self,
        error: NotFiniteStepError,
        form: StepForm,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, float],
    ) -> UndoneStepError:
        """Return the error for an undone step, which names the origin of the first bad value."""
        assert form.session is not None, "it has taken the step"
        graph, gather = form.planned.graph, self._training.team.gather
        found = first_bad_value(
            form.session, graph, batch, scalars, gather, batch_is=self._engine.batch_is
        )
        undone = error.replaced(UndoneStepError, where=(*error.where, *found))
        undone.outputs, undone.bad_value = error.outputs, found
        return undone

    def evaluate(
        self, batch: Any, /, *, batch_is: BatchIs | None = None, averaged: bool = False
    ) -> StepOutput:
        """Return loss and metrics of a batch in evaluation mode; no state changes.

        Args:
            batch: A batch of any size. The first batch of each size is captured and planned.
            batch_is: Whether this process passes the whole batch or its part; None for the value
                that holds for training steps.
            averaged: Whether moving averages (`UpdateOptions.ema_decay`) replace their parameters.
        """
        mode = Mode.AVERAGED if averaged else Mode.EVALUATION
        return self._forward(batch, batch_is or self._engine.batch_is, mode)

    def evaluator(self, example: Any, *, averaged: bool) -> tuple[Session, PhysicalPlan]:
        """Return a session that evaluates batches of one size, until the step closes; and its plan.

        Args:
            example: A whole batch of that size.
            averaged: See `evaluate`.
        """
        self._training.check_open()
        self._training.enter("step.evaluator(example)")
        mode = Mode.AVERAGED if averaged else Mode.EVALUATION
        session, planned = self._forwards.start(self._current, example, mode, batch_is="global")
        return session, planned.plan

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Return a context in which steps return their loss and change no state.

        The model stays in training mode. Gradients are not accumulated over steps: a plan is one
        whole step, including the update, and `micro_batches=` accumulates inside it.
        """
        before, self._updates = self._updates, False
        try:
            yield
        finally:
            self._updates = before

    def _forward(self, batch: Any, batch_is: BatchIs, mode: Mode) -> StepOutput:
        self._training.check_open()
        is_step = mode is Mode.TRAINING
        call = "step(batch) inside step.no_update()" if is_step else "step.evaluate(batch)"
        self._training.enter(call)
        try:
            result = self._forwards.step(
                self._current,
                self._padding(batch, batch_is),
                self._draws(),
                mode,
                batch_is=batch_is,
                call=call,
            )
        except (CaptureError, SbpValueError):
            # A loss may accept other containers. If it does not, this error names the reason.
            check_batch_names(flatten_batch(batch), self._batch_names)
            raise
        return StepOutput.of(result)

    @property
    def _batch_names(self) -> list[str]:
        """The names of the tensors of the example."""
        inputs = self._planned.graph.inputs
        return [one.name for one in inputs if one.kind is InputKind.BATCH]

    def _draws(self) -> dict[str, float]:
        """Return the scalars that determine the random numbers of a step."""
        return {"seed": self._engine.seed, "step": self._training.steps_done}

    @property
    def data_parallel_size(self) -> int:
        """Number of parts of a batch: `num_replicas` of a `DistributedSampler`.

        Raises:
            SbpValueError: the ranks split the samples of two batch tensors differently.
        """
        if self.world.size == 1:
            return 1
        plan = self._planned.plan
        held = (sum(map(len, local_samples(plan, [part.rank]))) for part in plan.ranks)
        of = next((part.of for part in self._forms.first.parts.values() if part.shape), 1)
        return of // max(held, default=of)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the part that this process loads: `rank` of a `DistributedSampler`.

        Processes that hold the same samples, as along an axis `tensor`, load the same part. A
        process that reads no batch, in the middle of a pipeline, may load any part.
        """
        samples = local_samples(self._planned.plan, self._engine.ranks)
        return samples[0].start // len(samples[0]) if samples else 0

    # The plan.

    @property
    def forms(self) -> tuple[PhysicalPlan, ...]:
        """The plans of all forms of the step, in the order of their first use, from `plan` on."""
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
        """The program that every rank runs."""
        return self._planned.plan

    def report(self, file: TextIO | None = None, *, max_rows: int = 30) -> None:
        """Print the plan as `sbp-plan` does: layouts, boxing, time, memory. On rank 0 only.

        The report includes the result of the proof and, after steps that were compared with one
        device, the differences.

        Args:
            file: Where to print; standard output if None.
            max_rows: The largest number of rows of the table; 0 for no table.
        """
        out = file or sys.stdout
        if self.world.rank != 0 or out is None:  # None if the process has no standard output
            return
        console = make_console(file=out)
        mesh = self._engine.settings.mesh
        sizes = dict(zip(mesh.axes, mesh.mesh_shape, strict=True))
        with console.capture() as captured:
            print_plan(console, self._planned, sizes, max_rows, "raise max_rows to see them")
            say(console, self._padding.lines)
            say(console, self._comparison.lines() if self._comparison else [])
        out.write(legible(captured.get(), out))
