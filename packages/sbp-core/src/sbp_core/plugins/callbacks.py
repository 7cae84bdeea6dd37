"""What a callback sees of a run, and what it may ask of it: the contract of kind `callback`.

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
    """How far a run has come. A checkpoint keeps it as a JSON value (`sbp_core.serialize`).

    Args:
        step: Optimizer updates that are done, >= 0; those that loss scaling has skipped, too.
        samples: Samples that they took, over all ranks, >= 0.
        tokens: Tokens that they took, if the data are text, >= 0.
        epoch: Times that the training data have been gone through whole, >= 0.
        train_s: Seconds of training over all stops, >= 0: steps, evaluation and saving, but no
            planning. Equal in all processes.
        best: The lowest held-out loss so far; None if none was finite.
        best_step: The step after which that was found; None if `best` is.
        callbacks: What each callback keeps (`Callback.state_dict`), by its name.

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
    """What a callback asks of the trainer; all processes do what a callback of one asks.

    Args:
        stop: Why the run is to end after this step, in a few words; empty if it is not.
        evaluate: Whether to evaluate after this step.
        save: Whether to write a checkpoint after this step.
    """

    stop: str = ""
    evaluate: bool = False
    save: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """The run that a callback is in.

    Args:
        folder: Of the run.
        is_first: Whether this process speaks for the run: only that one prints and writes files.
        total_steps: Steps of the whole run; None if its budget is of time.
        batch_size: Samples of a step, over all ranks.
    """

    folder: Path
    is_first: bool
    total_steps: int | None
    batch_size: int


class Callback:
    """Kind `callback`: `build(config)` returns one. Overwrite the methods that you need.

    Each process of a run has its own, and calls it after the same steps. Losses and the state are
    equal in all of them, times in the metrics are not. What a method raises ends the run, with the
    states of that step saved.
    """

    def on_train_begin(self, context: TrainingContext, state: TrainerState) -> None:
        """See a run before its first step; `state` is that of a checkpoint if it is resumed."""

    def on_step_end(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        """See a step that is done, and what is logged of it: `loss`, `lr`, `step_s` and others."""

    def on_evaluate(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        """See an evaluation after a step, with `held_out_loss`, before that step's `on_step_end`.

        `state.best_step` is `state.step` if that was the best one so far.
        """

    def on_train_end(self, state: TrainerState) -> None:
        """See a run after its last step; not called if it is stopped or fails."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps of the callback: numbers, texts, lists, mappings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned when the run was saved, before `on_train_begin`."""
