"""One step of training: its learning rates, the step itself, what is measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sbp_core.errors import RunError
from sbp_core.runtime import NotFiniteStepError, Session
from sbp_launch.data.loader import LocalBatch
from sbp_launch.planning.flow import Planned
from sbp_launch.run.run import Run
from sbp_launch.run.speed import Speed
from sbp_launch.team import Team
from sbp_launch.tracing.tracer import StepTracer
from sbp_launch.trainer.figures import StepMeter
from sbp_launch.trainer.finite_loss import FiniteLoss
from sbp_launch.trainer.first_bad_value import first_bad_value
from sbp_launch.trainer.planned import program_guard
from sbp_launch.trainer.program import Program
from sbp_torch.capture import scalar_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step that was taken.

    Args:
        metrics: Its loss, and what the model and the update give beside it.
        factor: Of the learning rate.
        rates: The learning rates.
        bad_value: Where the first bad value was, of a step that was undone; else empty.
    """

    metrics: Mapping[str, float]
    factor: float
    rates: Mapping[str, float]
    bad_value: tuple[str, ...]

    @property
    def loss(self) -> float:
        """Its loss."""
        return self.metrics["loss"]


class StepTaker:
    """Takes steps on the session of a run, and measures and traces them.

    Args:
        run: The run.
        program: Whose model and optimizer give the scalars of a step.
        planned: What the session runs.
        session: Takes the steps; is told whether it is to undo those that are not finite.
        step_meter: Measures them.
        tracer: Traces those that are to be traced.
        team: The processes of the run, which look for a bad value together.
        speed: Is told of each step.
        step_units: Tokens or samples of a step, as `speed` counts them.
    """

    def __init__(
        self,
        run: Run,
        program: Program,
        planned: Planned,
        session: Session,
        step_meter: StepMeter,
        tracer: StepTracer,
        team: Team,
        speed: Speed,
        step_units: int,
    ) -> None:
        trainer = run.config.trainer
        self._seed, self._schedule = trainer.seed, trainer.schedule
        self._planned, self._session, self._step_meter = planned, session, step_meter
        self._tracer, self._team = tracer, team
        self._speed, self._step_units = speed, step_units
        self._given = scalar_values(program.model, program.optimizer, trainer.update)
        self._guard = program_guard(run, program)
        self._finite = FiniteLoss(run.config)
        session.only_finite = self._finite.undoes

    def take(
        self, batch: LocalBatch, index: int, place: tuple[float, float], waited_s: float
    ) -> Taken:
        """Take a step.

        Args:
            batch: What this process holds of its batch.
            index: Steps done before.
            place: Where the step is in the run, as schedules take it.
            waited_s: Seconds that the step has waited for its batch.

        Raises:
            RunError: a rank failed; or something has changed what the program reads.
        """
        if changes := self._guard.changes():
            raise RunError(
                f"{changes[0].what}: it is another step now",
                where=changes[0].where,
                accepted="a program that stays what it was when the run began",
                todo="let the data give what changes, as a tensor of the batch; or start another "
                "run with trainer.init_from",
            )
        self._speed.begin(waited_s)
        factor = self._schedule.factor(*place)
        rates = {n: v * factor for n, v in self._given.items() if n.partition(".")[0] == "lr"}
        scalars = {**self._given, **rates, "seed": self._seed, "step": index}
        bad_value: tuple[str, ...] = ()
        try:
            with self._tracer.step(index + 1, self._session):
                outputs = self._step_meter.step(self._session, batch.values, scalars)
        except NotFiniteStepError as error:
            outputs = error.outputs
            bad_value = first_bad_value(
                self._session, self._planned.graph, batch.values, scalars, self._team.gather
            )
        self._speed.end(self._step_units)
        metrics = {name: value.item() for name, value in outputs.items() if not value.dim()}
        return Taken(metrics=metrics, factor=factor, rates=rates, bad_value=bad_value)

    def check(self, step: int, taken: Taken) -> str:
        """Look whether a step, counted from 1, is finite; return a warning, or "".

        Raises:
            NotFiniteError: it is not, and the run is to stop.
        """
        return self._finite.check(step, taken.metrics, taken.rates, taken.bad_value)
