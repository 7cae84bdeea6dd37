"""Learning-rate schedules: the factor of each step, a pure function of its place in the run."""

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
            `inverse_sqrt`, which falls as 1/sqrt(step), or `wsd` (warm-up, stable, decay): 1 at
            first, and linear to `final` over the last steps.
        warmup_steps: Steps of the linear warm-up, >= 0; the last of them has the factor 1.
        final: Factor at the end of a linear, cosine or wsd decay, in [0, 1].
        decay_ratio: Of wsd: share of the steps after the warm-up in which it falls, in (0, 1].
    """

    decay: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    warmup_steps: int = 0
    final: float = 0.0
    decay_ratio: float = 0.2

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is too small", accepted="an integer >= 0"
            )
        if not 0.0 <= self.final <= 1.0:
            raise ConfigError(f"final={self.final!r} is out of range", accepted="0 to 1")
        if not 0.0 < self.decay_ratio <= 1.0:
            raise ConfigError(
                f"decay_ratio={self.decay_ratio!r} is out of range", accepted="above 0, up to 1"
            )

    def factor(self, step: float, steps: float) -> float:
        """Return what the learning rate of a step is multiplied by.

        Args:
            step: Number of the step, from 0.
            steps: Steps of the whole run, > 0, perhaps infinite; the factor stays as it is after
                them.
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
