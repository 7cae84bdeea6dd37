"""Where the time of training goes: to data, steps, evaluation, saving, and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

#: What a run is at between its first step and its last.
Phase = Literal["data", "steps", "evaluation", "saving", "comparison"]

#: Shares below this are summed up.
_LEAST_SHARE = 0.005


class PhaseTimes:
    """Seconds of each phase of training, in this process and since it began."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """Count the seconds of the `with` block to a phase, also if it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - began)

    def add(self, phase: Phase, seconds: float) -> None:
        """Count so many seconds to a phase."""
        self._seconds[phase] = self[phase] + seconds

    def __getitem__(self, phase: Phase) -> float:
        return self._seconds.get(phase, 0.0)

    @property
    def total_s(self) -> float:
        """Seconds since training began."""
        return time.perf_counter() - self._began

    def line(self, total_s: float) -> str:
        """Return the shares of the phases, the largest first, such as `steps 93%, data 4%, ...`.

        Args:
            total_s: What they are shares of, in seconds, > 0.
        """
        shares = {phase: seconds / total_s for phase, seconds in self._seconds.items()}
        parts = [
            f"{phase} {share:.1%}"
            for phase, share in sorted(shares.items(), key=lambda entry: -entry[1])
            if share >= _LEAST_SHARE
        ]
        rest = 1.0 - sum(share for share in shares.values() if share >= _LEAST_SHARE)
        if rest >= _LEAST_SHARE:
            parts.append(f"other {rest:.1%}")
        return ", ".join(parts)
