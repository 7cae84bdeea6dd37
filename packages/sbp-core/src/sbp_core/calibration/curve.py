"""Fit the time of one kind of collective or message, by its bytes: piecewise linear, from samples.

    time = α + Σ β_j · (bytes of the call between knot j and knot j + 1)

Real transports have regimes (eager and rendezvous messages, caches), so one β is not enough. α (the
latency) and all β are >= 0: time never falls with size. Beyond the last knot the last β continues.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from sbp_core.calibration.nonnegative import solve
from sbp_core.errors import SbpValueError

_MOST_SEGMENTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A monotone piecewise linear time.

    Args:
        latency_s: α, in seconds.
        knots_bytes: Where segments start; the first at 0, ascending.
        s_per_byte: β of each segment, in seconds per byte.
    """

    latency_s: float
    knots_bytes: tuple[int, ...]
    s_per_byte: tuple[float, ...]
    #: Time at each knot.
    _starts_s: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        knots, rates = self.knots_bytes, self.s_per_byte
        rising = all(a < b for a, b in pairwise(knots))
        if not knots or knots[0] != 0 or not rising or len(rates) != len(knots):
            raise SbpValueError(
                f"a curve with segments from {list(knots)} bytes and {len(rates)} rates",
                accepted="segments that start at 0 and ascend, and one rate for each",
            )
        if not all(0 <= number < float("inf") for number in (self.latency_s, *rates)):
            raise SbpValueError(f"a curve that falls: {self}", accepted="latency and rates >= 0")
        starts = [self.latency_s]
        for start, stop, rate in zip(knots, knots[1:], rates, strict=False):
            starts.append(starts[-1] + rate * (stop - start))
        object.__setattr__(self, "_starts_s", tuple(starts))

    def time_s(self, size_bytes: float) -> float:
        """Return the time of a size >= 0, in seconds."""
        at = bisect_right(self.knots_bytes, size_bytes) - 1
        return self._starts_s[at] + self.s_per_byte[at] * (size_bytes - self.knots_bytes[at])

    def stretched(self, factor: float) -> Curve:
        """Return the curve for calls whose bytes take `factor` times as long."""
        rates = tuple(factor * rate for rate in self.s_per_byte)
        return Curve(latency_s=self.latency_s, knots_bytes=self.knots_bytes, s_per_byte=rates)


def through(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> Curve:
    """Return the curve through points: sizes ascending from 0, and times that never fall."""
    rates = [
        max(0.0, (late - soon) / (large - small))
        for (small, large), (soon, late) in zip(
            pairwise(sizes_bytes), pairwise(times_s), strict=True
        )
    ]
    return Curve(latency_s=times_s[0], knots_bytes=tuple(sizes_bytes[:-1]), s_per_byte=tuple(rates))


def segments(size_bytes: NDArray[np.float64], knots: Sequence[int]) -> NDArray[np.float64]:
    """Return the number of bytes of each size in each segment: (sizes, knots), float64."""
    starts = np.asarray(knots, dtype=np.float64)
    lengths = np.append(np.diff(starts), np.inf)
    return np.clip(size_bytes[:, None] - starts, 0.0, lengths)


def fit_curve(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> Curve:
    """Fit a curve to measured times: as few segments as explain them.

    Segments are added one by one, each at the size that reduces the error most; then the number of
    segments that is best by Akaike's criterion, corrected for few samples, is kept. Errors are
    relative to the measured time.

    Args:
        sizes_bytes: One or more sizes, in any order; they may repeat.
        times_s: The measured times, above 0.

    Source: Hurvich and Tsai, "Regression and time series model selection in small samples" (1989).
    """
    return _fit_curve(tuple(sizes_bytes), tuple(times_s))


@lru_cache(maxsize=1024)
def _fit_curve(sizes_bytes: tuple[int, ...], times_s: tuple[float, ...]) -> Curve:
    """Return the result of `fit_curve`; cached, because cross-validation repeats most fits."""
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    times = np.asarray(times_s, dtype=np.float64)
    best, score = _fit(sizes, times, (0,))
    grown = best
    candidates = sorted({int(size) for size in sizes})[1:-1]
    while len(grown.knots_bytes) < min(_MOST_SEGMENTS, len(best.knots_bytes) + 3):
        free = [knot for knot in candidates if knot not in grown.knots_bytes]
        tried = [_fit(sizes, times, tuple(sorted((*grown.knots_bytes, knot)))) for knot in free]
        if not tried:
            break
        # Two knots may help where each of them alone does not, so a few more knots are tried.
        grown, lower = min(tried, key=lambda pair: pair[1])
        if lower < score:
            best, score = grown, lower
    return best


def _fit(
    sizes: NDArray[np.float64], times: NDArray[np.float64], knots: tuple[int, ...]
) -> tuple[Curve, float]:
    """Return the best curve with these knots, and its score (lower is better)."""
    rows = np.column_stack([np.ones(len(sizes)), segments(sizes, knots)]) / times[:, None]
    found = solve(rows, np.ones(len(sizes)))
    residual = float(((rows @ found - 1.0) ** 2).sum())
    curve = Curve(
        latency_s=float(found[0]),
        knots_bytes=knots,
        s_per_byte=tuple(float(rate) for rate in found[1:]),
    )
    count, unknowns = len(sizes), len(knots) + 1
    if count <= unknowns + 1:
        return curve, inf
    # An error of a thousandth counts as exact: further segments would fit the noise.
    spread = max(residual / count, 1e-6)
    penalty = 2 * unknowns * count / (count - unknowns - 1)
    return curve, count * log(spread) + penalty
