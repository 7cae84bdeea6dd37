"""Count how much of its budget a run has trained, and schedule its learning rate by that.

A budget is a number of steps, epochs, tokens or hours. The factor of the learning rate is a pure
function of a step's place in the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sbp_core.errors import ConfigError
from sbp_core.plugins import TrainerState
from sbp_launch.checks import check_least

#: The units of a budget.
Unit = Literal["steps", "epochs", "tokens", "hours"]

#: The budget of a run without one.
DEFAULT_STEPS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a run trains in total, over all interruptions.

    Args:
        unit: The unit of `amount`.
        amount: The size of the budget, > 0.
    """

    unit: Unit
    amount: float

    def allowance(self, *, step_samples: int, step_tokens: int, epoch_samples: int) -> Allowance:
        """Return the budget in a unit in which steps can be counted.

        Args:
            step_samples: Samples of a step, over all ranks, >= 1.
            step_tokens: Tokens of a step; 0 if the data are not text.
            epoch_samples: Samples of the training data, >= 1.

        Raises:
            ConfigError: the budget is in tokens, and the data have none.
        """
        if self.unit == "tokens" and not step_tokens:
            raise ConfigError(
                f"trainer.tokens={self.amount:g}: the data have no tokens",
                accepted="trainer.steps, trainer.epochs or trainer.hours",
            )
        goal, each = {
            "steps": (self.amount, 1),
            "epochs": (math.ceil(self.amount * epoch_samples), step_samples),
            "tokens": (self.amount, step_tokens),
            "hours": (self.amount * 3600.0, None),
        }[self.unit]
        return Allowance(unit=self.unit, goal=goal, each=each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A budget in steps, samples, tokens or seconds.

    Args:
        unit: The unit of the budget.
        goal: The count at which the run ends, > 0.
        each: The count of one step; None for time, because it is not known in advance.
    """

    unit: Unit
    goal: float
    each: int | None

    def done(self, state: TrainerState) -> float:
        """Return the count that is done."""
        counts = {
            "steps": state.step,
            "epochs": state.samples,
            "tokens": state.tokens,
            "hours": state.train_s,
        }
        return counts[self.unit]

    def is_spent(self, state: TrainerState) -> bool:
        """Return whether the run has ended."""
        return self.done(state) >= self.goal

    def share(self, state: TrainerState) -> float:
        """Return the done share of the budget, in [0, 1]."""
        return min(1.0, self.done(state) / self.goal)

    def total_steps(self, state: TrainerState) -> int | None:
        """Return the number of steps of the run, including those done; None for time."""
        if self.each is None:
            return None
        left = max(0.0, self.goal - self.done(state))
        return state.step + math.ceil(left / self.each)

    def place(self, state: TrainerState) -> tuple[float, float]:
        """Return the place of the next step, for schedules: its number from 0, and the total.

        Both are in steps of the present batch size, so that the schedule continues at the same
        place after a change of the batch size. With a budget of time, the total is estimated from
        the mean time of all steps so far.
        """
        if self.each is not None:
            return self.done(state) / self.each, math.ceil(self.goal / self.each)
        share = self.share(state)
        return state.step, state.step / share if share else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The schedule of the learning rate: a linear warm-up, then `decay`.

    Args:
        decay: `constant`, `linear` or `cosine` from 1 to `final` over the steps after the warm-up,
            `inverse_sqrt`, which falls as 1/sqrt(step), or `wsd` (warm-up, stable, decay): 1 at
            first, and linear to `final` over the last steps.
        warmup_steps: Steps of the linear warm-up, >= 0; the last of them has the factor 1.
        final: Factor at the end of a linear, cosine or wsd decay, in [0, 1].
        decay_ratio: For wsd: share of the steps after the warm-up in which it falls, in (0, 1].
    """

    decay: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    warmup_steps: int = 0
    final: float = 0.0
    decay_ratio: float = 0.2

    def __post_init__(self) -> None:
        check_least(self, 0, "warmup_steps")
        if not 0.0 <= self.final <= 1.0:
            raise ConfigError(f"final={self.final!r} is out of range", accepted="0 to 1")
        if not 0.0 < self.decay_ratio <= 1.0:
            raise ConfigError(
                f"decay_ratio={self.decay_ratio!r} is out of range", accepted="above 0, up to 1"
            )

    def factor(self, step: float, steps: float) -> float:
        """Return the factor of the learning rate in a step.

        Args:
            step: Number of the step, from 0.
            steps: Steps of the whole run, > 0, possibly infinite; after them, the factor is
                constant.
        """
        if step < self.warmup_steps:
            return min(1.0, (step + 1) / self.warmup_steps)
        after = step - self.warmup_steps
        if self.decay == "inverse_sqrt":
            first = max(1, self.warmup_steps)
            return math.sqrt(first / (first + after))
        rest = max(1, steps - self.warmup_steps)
        share = min(1.0, after / rest)
        if self.decay == "wsd":
            share = max(0.0, 1.0 - (1.0 - share) / self.decay_ratio)
        if self.decay in ("linear", "wsd"):
            return 1.0 - (1.0 - self.final) * share
        if self.decay == "cosine":
            return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * share)) / 2.0
        return 1.0
