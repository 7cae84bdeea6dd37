"""The callback `early_stop`: ends a run whose evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.plugins import Callback, TrainerControl, TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopConfig:
    """Settings of the callback `early_stop`.

    Args:
        monitor: A metric of evaluation: `held_out_loss`, or `held_out_NAME` of the model's metric.
        mode: Whether a lower (`min`) or a higher (`max`) value is better.
        patience: Evaluations without an improvement after which the run ends, >= 1.
        min_delta: A change of at most this much is not an improvement, >= 0.
    """

    monitor: str = "held_out_loss"
    mode: Literal["min", "max"] = "min"
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"patience={self.patience} is too small", accepted="an integer >= 1")
        if not 0.0 <= self.min_delta < math.inf:
            raise ConfigError(
                f"min_delta={self.min_delta} is out of range", accepted="a finite number >= 0"
            )

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Check that the run is evaluated while it trains.

        Raises:
            ConfigError: it is not.
        """
        evaluate = getattr(others.get("trainer"), "evaluate", None)
        if evaluate is not None and not (evaluate.every and evaluate.batches):
            raise ConfigError(
                f"early_stop has nothing to watch: trainer.evaluate.every={evaluate.every}, "
                f"trainer.evaluate.batches={evaluate.batches}",
                accepted="steps between two evaluations, of at least one batch",
                todo="such as trainer.evaluate.every=100",
            )


class EarlyStop(Callback):
    """Ends a run whose held-out loss, or another metric, has stopped improving."""

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config = config
        self._best: float | None = None
        self._worse = 0  # number of evaluations since the best one

    def on_evaluate(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        """Count evaluations without improvement, and stop the run after `patience` of them."""
        config = self.config
        if config.monitor not in metrics:
            raise ConfigError(
                f"early_stop watches {config.monitor!r}, which an evaluation does not give",
                accepted=", ".join(sorted(metrics)),
                todo="choose one of these: {name: early_stop, monitor: METRIC}",
            )
        found = metrics[config.monitor] * (1.0 if config.mode == "min" else -1.0)
        if math.isfinite(found) and (self._best is None or found < self._best - config.min_delta):
            self._best, self._worse = found, 0
            return None
        self._worse += 1
        if self._worse < config.patience:
            return None
        times = f"{self._worse} evaluation{'s' * (self._worse > 1)}"
        return TrainerControl(stop=f"{config.monitor} has not improved for {times}")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the best value so far, and the number of evaluations since then."""
        return {"best": self._best, "worse": self._worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a saved state."""
        best, worse = state["best"], state["worse"]
        if not (best is None or isinstance(best, float)) or not isinstance(worse, int):
            raise SbpValueError(f"best={best!r}, worse={worse!r}", accepted="a number, an integer")
        self._best, self._worse = best, worse
