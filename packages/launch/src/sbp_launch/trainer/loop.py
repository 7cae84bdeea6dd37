"""The training loop: it takes steps until the budget is spent.

    step -> metrics -> callbacks -> next batch -> vote ┬─────────────────────────────────> next step
                                                       └-> evaluation -> callbacks -> vote ┘

A checkpoint that is due follows the last vote. All processes vote in one small all-reduce: whether
one must stop, requests of callbacks, and the time of training. So all of them stop, evaluate and
save after the same steps, and the state of the run (`TrainerState`) is equal in all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from sbp_core.errors import SbpError
from sbp_core.plugins import Callback, MetricSink, TrainerControl, TrainerState, TrainingContext
from sbp_launch.data import BatchLoader, DataCursor, LocalPart, SampleOrder, is_for_gpus
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.utilization import ModelWork
from sbp_launch.run.metrics import calling_sink, metric_sink
from sbp_launch.run.progress import StepProgress
from sbp_launch.run.run import Run
from sbp_launch.run.speed import Speed
from sbp_launch.run.stopping import StopSignals
from sbp_launch.settings.budget import Allowance
from sbp_launch.step.comparison import OneDeviceComparison
from sbp_launch.step.training_step import TrainingStep
from sbp_launch.team import Team, fail_together, stop_together, vote_deadline_s
from sbp_launch.tracing.tracer import StepTracer
from sbp_launch.trainer.callbacks import ask, make_callbacks, restore, together
from sbp_launch.trainer.checkpoints import RunCheckpoints
from sbp_launch.trainer.evaluation import Evaluator
from sbp_launch.trainer.figures import StepMeter
from sbp_launch.trainer.phases import PhaseTimes
from sbp_launch.trainer.run_program import RunProgram
from sbp_launch.trainer.step import StepTaker

#: The unit, in seconds, in which processes send times on which they agree, as integers.
_TICK_S = 1e-6


def allowance_of(run: Run, program: RunProgram) -> Allowance:
    """Return the budget of a run, with which its steps are counted.

    Raises:
        ConfigError: it is a number of tokens, and the data have no tokens.
    """
    settings, (unit, units) = run.config.trainer, program.counted
    return settings.budget.allowance(
        step_samples=settings.batch_size,
        step_tokens=units * settings.batch_size if unit == "tokens" else 0,
        epoch_samples=program.cursor().order.num_samples,
    )


@dataclass(kw_only=True)
class TrainingLoop:
    """Takes the steps of a run; `state` always has the progress of the run.

    Args:
        run: The run.
        program: Provides the batches.
        step: Takes the steps; its processes stop together.
        step_meter: Measures the steps.
        tracer: Traces the steps that are selected for it.
        comparison: Takes the first steps on one device, too.
        signals: May request a stop after a step.
        checkpoints: Saves the states.
        state: The state with which the run starts or continues.
    """

    run: Run
    program: RunProgram
    step: TrainingStep
    step_meter: StepMeter
    tracer: StepTracer
    comparison: OneDeviceComparison | None
    signals: StopSignals
    checkpoints: RunCheckpoints
    state: TrainerState = field(default_factory=TrainerState)

    def __post_init__(self) -> None:
        unit, units = self.program.counted
        self._step_units = units * self.run.config.trainer.batch_size
        self._step_tokens = self._step_units if unit == "tokens" else 0
        self.speed = Speed(unit, begun=self.state.step)
        self.step_meter.begun = self.state.step
        self.phases = PhaseTimes()
        #: Loss of the latest step; None before the first.
        self.loss: float | None = None
        #: The latest held-out metrics, and the step after which they were computed.
        self.held_out: dict[str, float] = {}
        self.evaluated_step: int | None = None
        #: The reason that callbacks gave for ending the run, if any.
        self.stopped_for = ""
        self._saved_s = 0.0  # seconds of saving that were logged already
        self._begun_s = self.state.train_s
        self._steps = StepTaker(self.run.config, self.step, self.speed, self._step_units)

    @property
    def planned(self) -> Planned:
        """The plan that the ranks run."""
        return self.step.planned

    @property
    def team(self) -> Team:
        """The processes of the run."""
        return self.step.team

    def saved_state(self) -> TrainerState:
        """Return the state of the run and of its callbacks, for a checkpoint."""
        kept = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        return replace(self.state, callbacks={name: own for name, own in kept.items() if own})

    def save(self, *, is_finite: bool = True) -> str:
        """Save the states of the ranks; all processes call this. Return the place, for messages.

        Args:
            is_finite: Whether a run can continue from it.

        Raises:
            RunError: it cannot be saved; earlier checkpoints are kept.
        """
        self.count_done()
        with self.phases.timing("saving"):
            return self.checkpoints.save(
                self.step.session, self.saved_state(), self.cursor, is_finite=is_finite
            )

    def count_done(self) -> None:
        """Count completed steps that were not counted because of an interrupt."""
        while self.state.step < self.step.steps_done:
            self._advance()

    @cached_property
    def callbacks(self) -> dict[str, Callback]:
        """The callbacks of the run, by name."""
        return make_callbacks(self.run)

    @cached_property
    def _order(self) -> SampleOrder:
        """The order of the training data."""
        return self.program.cursor().order

    @property
    def cursor(self) -> DataCursor:
        """The place in the data at which the next step continues."""
        return DataCursor(position=self.state.samples, order=self._order)

    @cached_property
    def allowance(self) -> Allowance:
        """The budget of the run."""
        return allowance_of(self.run, self.program)

    def train(self) -> None:
        """Take all steps, and evaluate after the last one.

        Raises:
            ConfigError: a callback cannot be made, or cannot continue from the state.
            NotFiniteError: the loss is infinite or NaN, and `trainer.on_nan=stop`.
            RunError: the metrics cannot be written, or a rank failed.
            SbpError: a sample cannot be loaded; names it.
        """
        settings, begun = self.run.config.trainer, self.state
        total_steps = self.allowance.total_steps(begun)
        if self._is_over:
            budget = settings.budget
            reached = f"trainer.{budget.unit}={budget.amount:g} is reached"
            self.run.say([f"{reached}: there is no step to take"])
        restore(self.callbacks, begun)
        context = TrainingContext(
            folder=self.run.folder,
            is_first=self.run.is_first,
            total_steps=total_steps,
            batch_size=settings.batch_size,
        )
        for callback in self.callbacks.values():
            callback.on_train_begin(context, begun)
        with ExitStack() as opened:
            sink = opened.enter_context(metric_sink(self.run, begun.step))
            evaluator = Evaluator(self.run, self.program, self.step)
            loader = opened.enter_context(self._loader(total_steps))
            with StepProgress(
                self.run.console,
                total_steps,
                settings.log_every,
                self.speed,
                begun=begun.step,
                hours=settings.hours or 0.0,
            ) as progress:
                problem = self._load(loader)
                fail_together(self.team, problem)
                while not self._is_over:
                    self._step(loader, sink, evaluator, progress)
            if settings.evaluate.batches and self.evaluated_step != self.state.step:
                with self.run.stage("evaluating"):
                    self._evaluate(sink, evaluator)
        for callback in self.callbacks.values():
            callback.on_train_end(self.state)

    def _loader(self, total_steps: int | None) -> BatchLoader:
        """Return a loader of the batches of the remaining steps."""
        settings, plan = self.run.config.trainer, self.planned.plan
        return BatchLoader(
            self.program.source,
            "train",
            self.cursor,
            settings.batch_size,
            LocalPart(plan, self.step.session.local_ranks),
            ahead=settings.prefetch,
            num_batches=None if total_steps is None else total_steps - self.state.step,
            pinned=is_for_gpus(plan),
        )

    def _load(self, loader: BatchLoader) -> Exception | None:
        """Wait for the batch of the next step; return the error if it cannot be loaded."""
        if self._is_over:
            return None
        began = time.perf_counter()
        try:
            self._batch = loader.next()
        except SbpError as error:
            return error
        self._waited_s = time.perf_counter() - began
        return None

    def _step(
        self, loader: BatchLoader, sink: MetricSink, evaluator: Evaluator, progress: StepProgress
    ) -> None:
        """Take one step, and do all that follows it."""
        settings, step = self.run.config.trainer, self.state.step + 1
        batch = self._batch
        place = self.allowance.place(self.state)
        compared = self.comparison if self.comparison and self.comparison.is_due else None
        if compared is not None and not compared.has_begun:
            with self.phases.timing("comparison"):
                compared.begin(self.step.state_dict(to=0), self.state.step)
        taken = self._steps.take(batch, place, self._waited_s)
        self.loss = taken.loss
        if not taken.bad_value:
            self._advance()
        row = {**taken.metrics, **self._times(), **taken.rates}
        is_due = self._evaluation_is_due()
        problem: Exception | None = None
        control = TrainerControl()
        try:
            self.tracer.finish(step)  # first, because the ranks of all processes wait there
            if compared is not None:
                with self.phases.timing("comparison"):
                    whole = partial(self.program.batch, batch.begin, settings.batch_size)
                    compared.step(whole, taken.loss, taken.rates)
            progress.advance(step, taken.loss, self._train_s)
            if not is_due:
                self._log(sink, step, row)
            self.run.warn(self._steps.check(step, taken))
            if not is_due:
                control = self._call(row)
            problem = self._load(loader)
        except Exception as error:  # raised after the step, on all ranks together
            problem = error
        try:
            control = self._agree(problem, control)
        except BaseException:
            if is_due:  # log the known metrics of the step
                with suppress(Exception):
                    self._log(sink, step, row)
            raise
        if is_due or control.evaluate:
            is_last = self._is_over
            if is_last:
                progress.stop()
            with self.run.stage("evaluating") if is_last else nullcontext():
                after = self._evaluate(sink, evaluator, row if is_due else None)
            control = together([control, after])
            if not is_last:
                progress.say(step, f"held-out loss {self.held_out['held_out_loss']:.4f}")
        if control.save and not self._is_over:  # otherwise the run saves at its end
            with self.phases.timing("saving"):
                self.checkpoints.begin(
                    self.step.session,
                    self.saved_state(),
                    self.cursor,
                    lambda news: progress.say(step, news),
                )

    def _advance(self) -> None:
        """Count the completed step."""
        state, end = self.state, self.cursor.advanced(self.run.config.trainer.batch_size)
        self.state = replace(
            state,
            step=state.step + 1,
            samples=end.position,
            tokens=state.tokens + self._step_tokens,
            epoch=end.epoch,
        )

    def _times(self) -> dict[str, float]:
        """Return the speed metrics of the latest step, and count its time."""
        step_s, data_s = self.speed.step_s, self.speed.data_s
        self.phases.add("data", data_s)
        self.phases.add("steps", step_s - data_s)
        saved_s, self._saved_s = self.phases["saving"] - self._saved_s, self.phases["saving"]
        return {
            f"{self.speed.unit}_per_s": self.speed.step_rate,
            "mfu": self.work.mfu(step_s),
            "step_s": step_s,
            "data_s": data_s,
            "save_s": saved_s,
        }

    @property
    def _is_over(self) -> bool:
        """Whether no step follows."""
        return bool(self.stopped_for) or self.allowance.is_spent(self.state)

    def _evaluation_is_due(self) -> bool:
        """Whether an evaluation follows the latest step; equal in all processes without a vote."""
        evaluate, every = self.run.config.trainer.evaluate, self.run.config.trainer.evaluate.every
        is_turn = every is not None and self.state.step % every == 0
        return evaluate.batches > 0 and (is_turn or self._is_over)

    def _evaluate(
        self, sink: MetricSink, evaluator: Evaluator, row: Mapping[str, float] | None = None
    ) -> TrainerControl:
        """Evaluate after the latest step, and pass the metrics to callbacks and sink.

        Returns the requests of callbacks.

        Args:
            sink: The sink of the metrics.
            evaluator: Computes the metrics.
            row: Metrics of the step, if they were not logged yet.
        """
        step = self.state.step
        before_s = self.phases["evaluation"]
        with self.phases.timing("evaluation"):
            self.held_out, self.evaluated_step = evaluator.metrics(), step
        loss = self.held_out["held_out_loss"]
        is_best = math.isfinite(loss) and (self.state.best is None or loss < self.state.best)
        if is_best:
            self.state = replace(self.state, best=loss, best_step=step)
        found = {**self.held_out, "evaluate_s": self.phases["evaluation"] - before_s}
        saves = TrainerControl(save=is_best and self.run.config.trainer.checkpoint.best)
        problem, control = None, saves
        try:
            self._log(sink, step, {**(row or {}), **found})
            asked = ask(self.run, self.callbacks, "on_evaluate", self.state, found)
            control = together([saves, asked, self._call({**row, **found}) if row else None])
        except Exception as error:
            problem = error
        return self._agree(problem, control)

    def _log(self, sink: MetricSink, step: int, metrics: Mapping[str, float]) -> None:
        """Pass metrics to the sink; raises as `calling_sink` does."""
        with calling_sink(self.run, "log"):
            sink.log(step, metrics)

    def _call(self, metrics: Mapping[str, float]) -> TrainerControl:
        """Call the callbacks after the latest step; return their combined requests."""
        return ask(self.run, self.callbacks, "on_step_end", self.state, metrics)

    @cached_property
    def work(self) -> ModelWork:
        """The work of the model in a step."""
        mesh, cluster = self.program.mesh, self.program.cluster
        return ModelWork.of(self.planned.graph, cluster.device, mesh.size)

    @property
    def _train_s(self) -> float:
        """Seconds of training, including those before a resume, by the clock of this process."""
        return self._begun_s + self.phases.total_s

    def _agree(self, problem: Exception | None, control: TrainerControl) -> TrainerControl:
        """Agree with all processes on how the run continues; return the requests of all of them.

        Raises:
            Exception: see `stop_together`.
        """
        evaluates = control.evaluate and self.run.config.trainer.evaluate.batches > 0
        ticks = round(self._train_s / _TICK_S)
        stop, evaluate, save, ticks, is_saving = stop_together(
            self.team,
            self.signals,
            problem,
            vote_deadline_s(self.run.config, self.state.step - 1),
            [
                bool(control.stop),
                evaluates,
                control.save or self.checkpoints.is_due(self.state.step),
                ticks,
                self.checkpoints.is_busy,
            ],
        )
        if not is_saving:
            with self.phases.timing("saving"):
                self.checkpoints.go_on()
        self.state = replace(self.state, train_s=ticks * _TICK_S)
        if stop:
            self.stopped_for = control.stop or "a callback of another process"
        return TrainerControl(stop=self.stopped_for, evaluate=bool(evaluate), save=bool(save))
