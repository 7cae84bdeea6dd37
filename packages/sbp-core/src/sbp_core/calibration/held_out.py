"""Compute the errors of predicted communication times for measurements that a fit did not see.

`validate` makes these errors, and `sbp-calibrate` reports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sbp_core.calibration.sample import Measurement
from sbp_core.units import format_bytes, format_seconds

#: The property that the samples of one cross-validation fold share; see `validate`.
HELD_OUT_BY = ("size", "group", "collective")

#: The least error that is printed as a factor, not in percent.
_MANY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One sample that was left out of a fit, and the time that the fit predicts for it.

    Args:
        way: How it was left out, one of `HELD_OUT_BY`.
        sample: The measurement.
        predicted_s: Prediction by the fit that did not see it, in seconds.
    """

    way: str
    sample: Measurement
    predicted_s: float

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s / self.sample.time_s - 1)

    def __str__(self) -> str:
        """One line: the call, measured, predicted, error."""
        sample = self.sample
        return (
            f"{sample.case}, {format_bytes(sample.shared_bytes)}: "
            f"{format_seconds(sample.time_s)} measured, "
            f"{format_seconds(self.predicted_s)} predicted, {_share(self.error, 0)} off"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """The errors of a fit on samples that it did not see.

    Args:
        way: How they were left out, one of `HELD_OUT_BY`.
        num_samples: The number of samples, >= 1.
        median: Median of |predicted - measured| / measured.
        p90: 90th percentile of the same.
        worst: The largest of the same.
    """

    way: str
    num_samples: int
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, way: str, held_out: Sequence[HeldOut]) -> FitError:
        """Summarise predictions, of which there is at least one."""
        errors = sorted(entry.error for entry in held_out)
        return cls(
            way=way,
            num_samples=len(errors),
            median=median(errors),
            p90=errors[min(len(errors) - 1, int(0.9 * len(errors)))],
            worst=errors[-1],
        )

    def __str__(self) -> str:
        """One line: median, 90th percentile, worst."""
        return (
            f"left out by {self.way}: median {_share(self.median, 1)}, "
            f"90th percentile {_share(self.p90, 1)}, worst {_share(self.worst, 0)} "
            f"of {self.num_samples}"
        )


def _share(error: float, digits: int) -> str:
    """Return an error in percent, or as a factor if it is large."""
    return f"{error:.{digits}%}" if error < _MANY else f"{1 + error:,.0f} times"
