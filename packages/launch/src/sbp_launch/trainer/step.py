"""`StepTaker`: takes each training step of a run: sets learning rates, runs it, reads its metrics.

The training loop (`trainer.loop`) calls it for each batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sbp_launch.data.loader import LocalBatch
from sbp_launch.run.speed import Speed
from sbp_launch.settings.config import RunConfig
from sbp_launch.step.first_bad_value import UndoneStepError
from sbp_launch.step.training_step import TrainingStep
from sbp_launch.trainer.finite_loss import FiniteLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStep:
    """A step that was taken.

    Args:
        metrics: Its loss, and metrics of the model and the update.
        factor: The factor of the schedule for the learning rates.
        rates: The learning rates.
        bad_value: Where the first bad value was, if the step was undone; otherwise empty.
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
    """Takes the steps of a run, with the learning rates of its schedule.

    Args:
        config: The config of the run.
        step: Takes the steps; its `only_finite` is set here.
        speed: Gets the time and size of each step.
        step_units: Tokens or samples of a step, as `speed` counts them.
    """

    def __init__(
        self, config: RunConfig, step: TrainingStep, speed: Speed, step_units: int
    ) -> None:
        self._schedule, self._step = config.trainer.schedule, step
        self._speed, self._step_units = speed, step_units
        self._rates = {
            name: value for name, value in step.scalars.items() if name.partition(".")[0] == "lr"
        }
        self._finite = FiniteLoss(config)
        step.only_finite = self._finite.undoes

    def take(self, batch: LocalBatch, place: tuple[float, float], waited_s: float) -> TakenStep:
        """Take a step.

        Args:
            batch: The batch, or the part of it that this process has.
            place: The progress of the run, in the form that schedules take.
            waited_s: Seconds that the step has waited for its batch.

        Raises:
            RunError: a rank failed; or the program has changed and cannot be followed.
        """
        self._speed.begin(waited_s)
        factor = self._schedule.factor(*place)
        rates = {name: value * factor for name, value in self._rates.items()}
        bad_value: tuple[str, ...] = ()
        try:
            found = self._step(batch.values, **rates)
            outputs = {"loss": found.loss, **found.metrics}
        except UndoneStepError as error:
            outputs, bad_value = dict(error.outputs), error.bad_value
        self._speed.end(self._step_units)
        metrics = {name: value.item() for name, value in outputs.items() if not value.dim()}
        return TakenStep(metrics=metrics, factor=factor, rates=rates, bad_value=bad_value)

    def check(self, step: int, taken: TakenStep) -> str:
        """Check whether a step, counted from 1, is finite; return a warning, or "".

        Raises:
            NotFiniteError: it is not, and the run must stop.
        """
        return self._finite.check(step, taken.metrics, taken.rates, taken.bad_value)
