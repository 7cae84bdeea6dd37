"""Measured and predicted time, memory and bytes sent of the steps of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import mean, median

from sbp_core.boxing import BoxingBackend
from sbp_core.cluster import Cluster
from sbp_core.compile import PhysicalPlan
from sbp_core.runtime import Session, StepResult
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.run.speed import MIN_STEPS, median_of, warm_up_steps
from sbp_torch.memory import MemoryMeter

#: A step that takes so many times longer or shorter than predicted is far off.
_FAR_OFF = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The predictions for a step; None where there is none, and what they rest on.

    Args:
        step_s: Its time, in seconds.
        peak_bytes: Most bytes that a rank holds at once, of the rank that holds most.
        sent_bytes: Bytes that all ranks together send.
        basis: What the time rests on, and what to do if it is far off; see `prediction_basis`.
    """

    step_s: float | None
    peak_bytes: int | None
    sent_bytes: int | None
    basis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredUsage:
    """What ranks held and sent.

    Args:
        peak_bytes: Most bytes that one of them held at once; 0 if that was not counted.
        sent_bytes: Bytes that they sent together in a step, on average.
    """

    peak_bytes: int
    sent_bytes: float

    @classmethod
    def of_all(cls, texts: Sequence[str]) -> MeasuredUsage:
        """Return what the ranks of several processes did, of their `to_text`."""
        parts = [json.loads(text) for text in texts]
        return cls(
            peak_bytes=max(peak for peak, _ in parts), sent_bytes=sum(sent for _, sent in parts)
        )

    def to_text(self) -> str:
        """Return a text that `of_all` reads."""
        return json.dumps([self.peak_bytes, self.sent_bytes])


class StepMeter:
    """Measures time, memory and bytes sent of the steps of a session.

    Every step is timed, and what boxing has counted is read. What ranks hold is counted in the
    first step only, as watching makes every operator call some 50 µs slower.

    Args:
        plan: What the session runs.
        backend: Not yet open; the session is started with `self.backend` in its place.
        counts_memory: Whether operators are called one by one, so that they can be watched.
        ranks: That live in this process; all, if None.
    """

    def __init__(
        self,
        plan: PhysicalPlan,
        backend: BoxingBackend,
        *,
        counts_memory: bool,
        ranks: Collection[int] | None = None,
    ) -> None:
        self.ranks = tuple(part.rank for part in plan.ranks if ranks is None or part.rank in ranks)
        self.meter = MemoryMeter(plan, ranks) if counts_memory else None
        self.backend = self.meter.backend(backend) if self.meter else backend
        #: Steps that were done before, of a run that goes on.
        self.begun = 0
        self.step_s: list[float] = []
        self.sent_bytes: list[int] = []

    def take(self, session: Session, take: Callable[[], StepResult]) -> StepResult:
        """Take a step of a session by calling a function, and return what that returns."""
        is_first = not self.step_s
        sent = self._total_sent_bytes()
        began = time.perf_counter()
        with self.meter.watching(session) if self.meter and is_first else nullcontext():
            found = take()
            # A device may still be at work on it.
            found.loss.item()
        self.step_s.append(time.perf_counter() - began)
        self.sent_bytes.append(self._total_sent_bytes() - sent)
        return found

    @property
    def measured(self) -> MeasuredUsage:
        """What the ranks of this process held and sent."""
        peaks = [self.meter.peak(rank) for rank in self.ranks] if self.meter else []
        # In their first step, ranks of several processes also compare their plans.
        compared = self.backend.spans_processes and len(self.sent_bytes) > 1
        sent = self.sent_bytes[1:] if compared else self.sent_bytes
        return MeasuredUsage(
            peak_bytes=max(peaks, default=0), sent_bytes=mean(sent) if sent else 0.0
        )

    def lines(self, predicted: Predicted, measured: MeasuredUsage | None = None) -> list[str]:
        """Return a line for each figure that was measured, with the prediction after it.

        Args:
            predicted: The predictions.
            measured: What the ranks of all processes held and sent; those of this one if None.
        """
        measured = measured or self.measured
        expected = "" if predicted.step_s is None else format_seconds(predicted.step_s)
        lines = [_with_prediction(time_text(self.step_s, self.begun), expected)]
        if predicted.step_s and predicted.basis:
            lines += far_off(self.step_s, predicted.step_s, predicted.basis)
        if self.meter is not None and self.step_s:
            expected = "" if predicted.peak_bytes is None else format_bytes(predicted.peak_bytes)
            peak = format_bytes(measured.peak_bytes)
            text = f"a rank held at most {peak} (in step {self.begun + 1})"
            lines.append(_with_prediction(text, expected))
        # A runtime that moves data by itself leaves the backend closed: nothing is counted.
        if measured.sent_bytes:
            sent = format_bytes(measured.sent_bytes)
            expected = "" if predicted.sent_bytes is None else format_bytes(predicted.sent_bytes)
            lines.append(_with_prediction(f"the ranks sent {sent} in a step", expected))
        return lines

    def _total_sent_bytes(self) -> int:
        ranks = self.backend.local_ranks()
        return sum(self.backend.communicator(rank).sent_bytes for rank in ranks)


def time_text(step_s: Sequence[float], begun: int = 0) -> str:
    """Return how long a step took, of several; the first ones do not count.

    Args:
        step_s: The time of each step, in seconds.
        begun: Steps that were done before, of a run that goes on.
    """
    if len(step_s) < MIN_STEPS:
        return f"too few steps to time one: {len(step_s)} of at least {MIN_STEPS}"
    middle = format_seconds(_typical_s(step_s))
    return f"a step took {middle} ({median_of(len(step_s), begun)})"


def far_off(step_s: Sequence[float], predicted_s: float, basis: str) -> list[str]:
    """Return a line if the measured time of a step is far off the predicted one.

    Args:
        step_s: The time of each step, in seconds.
        predicted_s: Of a step, in seconds, > 0.
        basis: What the prediction rests on.
    """
    if len(step_s) < MIN_STEPS:
        return []
    measured_s = _typical_s(step_s)
    factor = max(measured_s / predicted_s, predicted_s / max(measured_s, 1e-9))
    if factor < _FAR_OFF:
        return []
    slower = "slower" if measured_s > predicted_s else "faster"
    times = f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"
    return [f"  {times} times {slower} than predicted: the prediction rests on {basis}"]


def prediction_basis(cluster: Cluster, profile: str, file: str = "", boxing: str = "local") -> str:
    """Say what predicted times rest on, and what to do where they are far off.

    Args:
        cluster: Whose rates they are, with the ranks of the run.
        profile: The option of the group `cluster`, such as `local`.
        file: The cluster file, if the profile reads one.
        boxing: The backend that the run boxes through.
    """
    ranks = cluster.num_devices
    again = f"sbp-calibrate boxing={boxing} ranks={ranks}"
    if not file:
        return (
            f"rates that cluster={profile} declares, not measured here; `{again}` measures them "
            "for cluster=measured"
        )
    if cluster.backend and cluster.backend != boxing:
        return (
            f"{file}, measured through boxing={cluster.backend}, not boxing={boxing}; "
            f"`{again} out={file}` adds that"
        )
    return (
        f"{file}, measured when the machine may have had other work, or with other ranks; "
        f"`{again} out={file}` measures again"
    )


def _typical_s(step_s: Sequence[float]) -> float:
    return median(step_s[warm_up_steps(len(step_s)) :])


def _with_prediction(measured: str, predicted: str) -> str:
    return f"{measured}; predicted {predicted}" if predicted else measured
