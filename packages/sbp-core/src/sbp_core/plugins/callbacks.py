"""The interface of trainer callbacks (kind `callback`): they observe a run, and may control it.

This one stops the run after a minute:

    class Stopwatch(Callback):
        def on_step_end(self, state, metrics):
            return TrainerControl(stop="late enough") if state.train_s > 60 else None
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The progress of a run. A checkpoint keeps it as a JSON value (`sbp_core.serialize`).

    Args:
        step: Finished optimizer updates, >= 0, including those that loss scaling has skipped.
        samples: Samples that these steps took, over all ranks, >= 0.
        tokens: Tokens that these steps took, if the data are text, >= 0.
        epoch: Completed passes over the training data, >= 0.
        train_s: Seconds of training, over all interruptions, >= 0: steps, evaluation and saving,
            but no planning. Equal in all processes.
        best: The lowest held-out loss so far; None if none was finite.
        best_step: The step after which `best` was measured; None if `best` is.
        callbacks: The state of each callback (`Callback.state_dict`), by its name.

    Raises:
        SbpValueError: a number is negative, or one of `best` and `best_step` is None.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    train_s: float = 0.0
    best: float | None = None
    best_step: int | None = None
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("step", "samples", "tokens", "epoch", "train_s"):
            if not 0 <= getattr(self, name) < float("inf"):  # NaN is neither above nor below
                raise SbpValueError(
                    f"{name}={getattr(self, name)} of a trainer's state is out of range",
                    accepted="a finite number >= 0",
                )
        if (self.best is None) != (self.best_step is None):
            raise SbpValueError(
                f"best={self.best} of a trainer's state does not go with "
                f"best_step={self.best_step}",
                accepted="both, or neither",
            )
        if self.best_step is not None and not 0 <= self.best_step <= self.step:
            raise SbpValueError(
                f"best_step={self.best_step} of a trainer's state is out of range",
                accepted=f"0 to step={self.step}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerControl:
    """A request of a callback to the trainer; all processes obey a request of any process.

    Args:
        stop: The reason to end the run after this step, in a few words; empty to continue.
        evaluate: Whether to evaluate after this step.
        save: Whether to write a checkpoint after this step.
    """

    stop: str = ""
    evaluate: bool = False
    save: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """The run in which a callback is called.

    Args:
        folder: The folder of the run.
        is_first: Whether this is the one process that prints and writes files for the run.
        total_steps: Steps of the whole run; None if its budget is of time.
        batch_size: Samples of a step, over all ranks.
    """

    folder: Path
    is_first: bool
    total_steps: int | None
    batch_size: int


class Callback:
    """Base class of plugins of kind `callback`: `build(config)` returns one. Override some methods.

    Each process of a run has its own callback, and calls it after the same steps. Losses and the
    state are equal in all of them, times in the metrics are not. An exception of a method ends the
    run, after the states of that step are saved.
    """

    def on_train_begin(self, context: TrainingContext, state: TrainerState) -> None:
        """Called before the first step; `state` is from the checkpoint if the run is resumed."""

    def on_step_end(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        """Called after a step, with its logged metrics: `loss`, `lr`, `step_s` and others."""

    def on_evaluate(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        """Called after an evaluation, with `held_out_loss`, before `on_step_end` of the same step.

        `state.best_step` is `state.step` if this evaluation is the best one so far.
        """

    def on_train_end(self, state: TrainerState) -> None:
        """Called after the last step; not called if the run is stopped or fails."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the callback's state for checkpoints: numbers, texts, lists, mappings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` at the time of saving, before `on_train_begin`."""
