"""Measure the training speed of a run: over the last steps, and as a median at its end.

The time of a step is from making its batch to its loss. Other work (the one-device program next to
the first steps, printing, evaluation) does not count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from sbp_core.units import format_seconds

#: Number of last steps from which speed and remaining time are computed.
WINDOW = 20

#: Fewest steps for a median: the first step is slower, because it fills caches.
MIN_STEPS = 3

#: Most steps at the beginning that do not count: caches fill, memory is touched first.
MAX_WARM_UP_STEPS = 10


def warm_up_steps(count: int) -> int:
    """Return how many of the first steps do not count, given the number of steps."""
    return min(MAX_WARM_UP_STEPS, count // 2)


def median_of(count: int, begun: int = 0) -> str:
    """Return which steps a median covers, given their number and the steps done before."""
    return f"median of steps {begun + warm_up_steps(count) + 1}-{begun + count}"


class Speed:
    """Seconds and units (tokens or samples) of the steps of a run.

    Args:
        unit: Name of the unit.
        clock: Clock in seconds, with any origin.
        begun: Steps that were done before this run was resumed.
    """

    def __init__(
        self, unit: str, clock: Callable[[], float] = time.perf_counter, begun: int = 0
    ) -> None:
        self.unit, self._clock, self._begun = unit, clock, begun
        self._began = clock()
        #: Seconds that the newest step has waited for its batch.
        self.data_s = 0.0
        self._all: list[tuple[int, float]] = []
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def begin(self, data_s: float = 0.0) -> None:
        """Start the clock of a step, which has waited `data_s` seconds for its batch."""
        self._began, self.data_s = self._clock() - data_s, data_s

    def end(self, units: int) -> None:
        """Stop the clock; the step has used `units` tokens or samples."""
        if len(self._all) == 1:
            self._window.clear()  # the first step does not represent later steps
        self._all.append((units, max(1e-9, self._clock() - self._began)))
        self._window.append(self._all[-1])

    @property
    def step_s(self) -> float:
        """Seconds of the last step."""
        return self._all[-1][1]

    @property
    def step_rate(self) -> float:
        """Units per second of the last step alone."""
        units, seconds = self._all[-1]
        return units / seconds

    def left_s(self, steps: int) -> float:
        """Return the estimated seconds of `steps` further steps, from the window."""
        return steps * sum(seconds for _, seconds in self._window) / len(self._window)

    def text(self) -> str:
        """Return the speed of the window; after the first step, which is slower, its time."""
        if len(self._all) == 1:
            return f"first step: {format_seconds(self.step_s)}"
        rate = sum(units for units, _ in self._window) / sum(seconds for _, seconds in self._window)
        return self._rate_text(rate)

    def summary(self) -> str:
        """Return the median speed of the whole run without the first steps; "" for too few."""
        rate, count = self.rate, len(self._all)
        if rate is None:
            return ""
        return f"{self._rate_text(rate)} ({median_of(count, self._begun)})"

    @property
    def rate(self) -> float | None:
        """Units per second: the median without the first steps; None for too few steps."""
        counted = self._all[warm_up_steps(len(self._all)) :]
        if len(self._all) < MIN_STEPS:
            return None
        return median(units / seconds for units, seconds in counted)

    @property
    def typical_s(self) -> float | None:
        """Seconds of a step: the median without the first steps; None for too few steps."""
        counted = self._all[warm_up_steps(len(self._all)) :]
        return median(seconds for _, seconds in counted) if len(self._all) >= MIN_STEPS else None

    def _rate_text(self, rate: float) -> str:
        return f"{rate:,.0f} {self.unit}/s" if rate >= 100 else f"{rate:.3g} {self.unit}/s"
