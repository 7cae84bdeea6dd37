"""Stop a run, or warn, if its loss or gradients are infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sbp_core.errors import RunError
from sbp_core.units import format_count
from sbp_launch.settings.config import RunConfig

#: If loss scaling skips more steps than this in a row, it is no longer searching for a scale.
MOST_SKIPPED = 30


class NotFiniteError(RunError):
    """The loss or the norm of the gradients is infinite or NaN: training has diverged.

    `is_undone` is whether the step was undone, so that the states are finite.
    """

    is_undone = False


class FiniteLoss:
    """Watches the metrics of a run.

    A step that loss scaling skips changes only the scale, so an overflow in it is not an error,
    unless more than `MOST_SKIPPED` steps in a row are skipped.

    Args:
        config: The config of the run; `trainer.on_nan` chooses between stopping and a warning.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._last = "no loss was finite"
        self._skipped = 0
        self._warned = False

    @property
    def undoes(self) -> bool:
        """Whether a step that is not finite should be undone."""
        trainer = self.config.trainer
        return trainer.on_nan == "stop" and trainer.update.loss_scaling is None

    def check(
        self,
        step: int,
        metrics: Mapping[str, float],
        rates: Mapping[str, float],
        bad_value: Sequence[str] = (),
    ) -> str:
        """Check the metrics of a step, counted from 1.

        Args:
            step: Its number.
            metrics: Its `loss`, and optionally `grad_norm` and `skipped`.
            rates: Its learning rates.
            bad_value: Where the first bad value was, if the step was undone.

        Returns:
            A warning, once, if the run is to continue; otherwise "".

        Raises:
            NotFiniteError: the run must stop.
        """
        wrong = [
            (name, metrics[name])
            for name in ("loss", "grad_norm")
            if name in metrics and not math.isfinite(metrics[name])
        ]
        self._skipped = self._skipped + 1 if metrics.get("skipped") else 0
        if not wrong:
            self._last = f"the last finite loss was {metrics['loss']:.4f}, of step {step}"
        if self._skipped > MOST_SKIPPED:
            what = f"loss scaling has skipped {self._skipped} steps in a row"
        elif wrong and not self._skipped:
            called = {"loss": "the loss", "grad_norm": "the norm of the gradients"}[wrong[0][0]]
            what = f"{called} is {wrong[0][1]}"
        else:
            return ""
        rate = ", ".join(f"{name} {value:g}" for name, value in rates.items())
        budget = self.config.trainer.budget
        of = f" of {format_count(int(budget.amount), 'step')}" if budget.unit == "steps" else ""
        where = f"step {step}{of} ({rate})"
        if self.config.trainer.on_nan == "stop":
            error = NotFiniteError(
                f"{what}; {self._last}", where=(where, *bad_value), todo=self._todo()
            )
            error.is_undone = bool(bad_value)
            raise error
        if self._warned:
            return ""
        self._warned = True
        return f"{what} in {where}; {self._last}; trainer.on_nan=warn continues"

    def _todo(self) -> str:
        trainer, ways = self.config.trainer, ["a smaller optimizer.lr"]
        if trainer.update.clip_norm is None:
            ways.append("trainer.update.clip_norm=1.0")
        if not trainer.schedule.warmup_steps:
            ways.append("trainer.schedule.warmup_steps=100")
        precision = self.config.compile.passes.mixed_precision
        halves = {self.config.compile.autocast, str(getattr(precision, "dtype", ""))}
        if "float16" in halves and trainer.update.loss_scaling is None:
            ways.insert(0, "trainer.update.loss_scaling={init_scale:65536.0}")
        return f"try {', '.join(ways)}; trainer.on_nan=warn continues anyway"
