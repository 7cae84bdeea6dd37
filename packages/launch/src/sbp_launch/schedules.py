"""Learning-rate schedules: the factor of each step, a pure function of its number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sbp_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate goes: up while warming up, then as `decay` says.

    Args:
        decay: `constant`, `linear` or `cosine` from 1 to `final` over the steps after the warm-up,
            or `inverse_sqrt`, which falls as 1/sqrt(step).
        warmup_steps: Steps of the linear warm-up, >= 0; the last of them has the factor 1.
        final: Factor at the end of a linear or cosine decay, in [0, 1].
    """

    decay: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "constant"
    warmup_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is too small", accepted="an integer >= 0"
            )
        if not 0.0 <= self.final <= 1.0:
            raise ConfigError(f"final={self.final!r} is out of range", accepted="0 to 1")

    def factor(self, step: int, steps: int) -> float:
        """Return what the learning rate of a step is multiplied by.

        Args:
            step: Number of the step, from 0.
            steps: Steps of the whole run, >= 1; the factor stays as it is after them.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        after = step - self.warmup_steps
        if self.decay == "inverse_sqrt":
            first = max(1, self.warmup_steps)
            return math.sqrt(first / (first + after))
        rest = max(1, steps - self.warmup_steps)
        share = min(1.0, after / rest)
        if self.decay == "linear":
            return 1.0 - (1.0 - self.final) * share
        if self.decay == "cosine":
            return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * share)) / 2.0
        return 1.0
