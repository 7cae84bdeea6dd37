"""Measure the shares of training time: data, steps, evaluation, saving, and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from sbp_core.units import format_seconds

#: The phases of a run between its first step and its last, in the order of the report.
Phase = Literal["steps", "data", "comparison", "evaluation", "saving"]


class PhaseTimes:
    """Seconds of each phase of training, in this process and since it began."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """Add the seconds of the `with` block to a phase, even if the block raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - began)

    def add(self, phase: Phase, seconds: float) -> None:
        """Add seconds to a phase."""
        self._seconds[phase] = self[phase] + seconds

    def __getitem__(self, phase: Phase) -> float:
        return self._seconds.get(phase, 0.0)

    @property
    def total_s(self) -> float:
        """Seconds since training began."""
        return time.perf_counter() - self._began

    def line(self) -> str:
        """Return the time so far and the shares in it: `12 s: steps 93.1%, data 4.2%, ...`.

        The line has the phases that occurred, in a fixed order, so that two runs can be compared.
        The rest is the time of the trainer itself: votes, metrics, callbacks, printing.
        """
        total_s = self.total_s
        told = [phase for phase in get_args(Phase) if phase in self._seconds]
        shares = {phase: self[phase] / total_s for phase in told}
        shares["rest"] = max(0.0, 1.0 - sum(shares.values()))
        listed = ", ".join(f"{phase} {share:.1%}" for phase, share in shares.items())
        return f"{format_seconds(total_s)}: {listed}"
