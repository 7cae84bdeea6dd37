"""Measure time, memory and bytes sent of the steps of a run, and compare with predictions."""

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

#: A prediction is far off if a step takes longer or shorter by at least this factor.
_FAR_OFF = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The predictions for a step (None if unknown), and their basis.

    Args:
        step_s: Its time, in seconds.
        peak_bytes: Peak memory of the rank with the highest peak, in bytes.
        sent_bytes: Bytes that all ranks together send.
        basis: The basis of the time, and what to do if it is far off; see `prediction_basis`.
    """

    step_s: float | None
    peak_bytes: int | None
    sent_bytes: int | None
    basis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredUsage:
    """The memory that ranks used, and the bytes that they sent.

    Args:
        peak_bytes: The highest peak memory of a rank, in bytes; 0 if it was not measured.
        sent_bytes: Bytes that all ranks together sent in a step, on average.
    """

    peak_bytes: int
    sent_bytes: float

    @classmethod
    def of_all(cls, texts: Sequence[str]) -> MeasuredUsage:
        """Return the usage of the ranks of several processes, from their `to_text`."""
        parts = [json.loads(text) for text in texts]
        return cls(
            peak_bytes=max(peak for peak, _ in parts), sent_bytes=sum(sent for _, sent in parts)
        )

    def to_text(self) -> str:
        """Return this usage as text, for `of_all`."""
        return json.dumps([self.peak_bytes, self.sent_bytes])


class StepMeter:
    """Measures time, memory and bytes sent of the steps of a session.

    Every step is timed, and the byte counters of boxing are read. The memory of ranks is measured
    in the first step only, because this makes every operator call about 50 µs slower.

    Args:
        plan: The plan that the session runs.
        backend: Not yet open; the session is started with `self.backend` in its place.
        counts_memory: Whether operators are called one by one, so that they can be watched.
        ranks: The ranks in this process; all if None.
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
        #: Steps done before, if the run was resumed.
        self.begun = 0
        self.step_s: list[float] = []
        self.sent_bytes: list[int] = []

    def take(self, session: Session, take: Callable[[], StepResult]) -> StepResult:
        """Take a step of a session by calling a function, and return its result."""
        is_first = not self.step_s
        sent = self._total_sent_bytes()
        began = time.perf_counter()
        with self.meter.watching(session) if self.meter and is_first else nullcontext():
            found = take()
            # Wait until the device has computed the loss.
            found.loss.item()
        self.step_s.append(time.perf_counter() - began)
        self.sent_bytes.append(self._total_sent_bytes() - sent)
        return found

    @property
    def measured(self) -> MeasuredUsage:
        """The memory that the ranks of this process used, and the bytes that they sent."""
        peaks = [self.meter.peak(rank) for rank in self.ranks] if self.meter else []
        # In their first step, ranks of several processes also compare their plans.
        compared = self.backend.spans_processes and len(self.sent_bytes) > 1
        sent = self.sent_bytes[1:] if compared else self.sent_bytes
        return MeasuredUsage(
            peak_bytes=max(peaks, default=0), sent_bytes=mean(sent) if sent else 0.0
        )

    def lines(self, predicted: Predicted, measured: MeasuredUsage | None = None) -> list[str]:
        """Return a line for each measured figure, with the prediction after it.

        Args:
            predicted: The predictions.
            measured: The usage of the ranks of all processes; of this process if None.
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
        # A runtime that moves data by itself never opens the backend, so nothing is counted.
        if measured.sent_bytes:
            sent = format_bytes(measured.sent_bytes)
            expected = "" if predicted.sent_bytes is None else format_bytes(predicted.sent_bytes)
            lines.append(_with_prediction(f"the ranks sent {sent} in a step", expected))
        return lines

    def _total_sent_bytes(self) -> int:
        ranks = self.backend.local_ranks()
        return sum(self.backend.communicator(rank).sent_bytes for rank in ranks)


def time_text(step_s: Sequence[float], begun: int = 0) -> str:
    """Return the typical time of a step as text; the first steps do not count.

    Args:
        step_s: The time of each step, in seconds.
        begun: Steps done before, if the run was resumed.
    """
    if len(step_s) < MIN_STEPS:
        return f"too few steps to time one: {len(step_s)} of at least {MIN_STEPS}"
    middle = format_seconds(_typical_s(step_s))
    return f"a step took {middle} ({median_of(len(step_s), begun)})"


def far_off(step_s: Sequence[float], predicted_s: float, basis: str) -> list[str]:
    """Return a line if the measured time of a step is far off the predicted one.

    Args:
        step_s: The time of each step, in seconds.
        predicted_s: The predicted time of a step, in seconds, > 0.
        basis: The basis of the prediction.
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
    """Return the basis of predicted times as text, and what to do if they are far off.

    Args:
        cluster: The cluster whose rates were used, with the ranks of the run.
        profile: The option of the group `cluster`, such as `local`.
        file: The cluster file, if the profile reads one.
        boxing: The boxing backend of the run.
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
