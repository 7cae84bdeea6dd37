"""A callback: ends a run when the moving average of its loss has reached a target."""

from collections.abc import Mapping
from typing import Any

from sbp_core.plugins import Callback, TrainerControl, TrainerState
from sbp_example_plugin.plugin import CallbackConfig


class StopAtLoss(Callback):
    """Keeps an average, which is saved in checkpoints, so that a resumed run continues with it."""

    def __init__(self, config: CallbackConfig) -> None:
        self.config = config
        self.average: float | None = None

    def on_step_end(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        """Request the end of the run after the step that reaches the target."""
        old = metrics["loss"] if self.average is None else self.average
        self.average = self.config.decay * old + (1 - self.config.decay) * metrics["loss"]
        if self.average > self.config.loss:
            return None
        return TrainerControl(stop=f"the loss has reached {self.config.loss}")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that a resumed run needs."""
        return {} if self.average is None else {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        self.average = float(state["average"])


def build(config: CallbackConfig) -> StopAtLoss:
    """Return the callback."""
    return StopAtLoss(config)
