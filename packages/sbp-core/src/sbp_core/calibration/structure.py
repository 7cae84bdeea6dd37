"""Predict the time of any collective or message, measured or not, by a model of its algorithm.

`Calibration` asks it for calls without a measured curve. Let n be the ranks of a group, g the
groups at once, S the bytes that a group shares (see `Measurement`). Each rank sends b bytes, and
gets a result of o bytes:

    kind             b              o
    all-reduce       2 (n-1) S/n    S
    reduce-scatter   (n-1) S/n      S/n
    all-gather       (n-1) S/n      S
    all-to-all       (n-1) S/n²     S/n
    transfer         S              S

    time = (call + round · L + moving(x) + fresh · [o >= T] o) · own(kind, x)

Small calls take L = ceil(log2 n) rounds whatever their kind: libraries choose such algorithms.
`moving` is a piecewise linear time of x, which is b; or S, for ranks that are threads and write one
result together. `fresh` is the time to touch memory for the first time: a result of T bytes or more
has new memory in every call. Each of these has a part for one rank alone, and a part that grows
with the n · g ranks at work (they share cores, memory bus or link). x and T are chosen to fit the
samples best. All rates are >= 0 and found by least squares of log(time), over all kinds together;
but collectives and transfers, which share no code, are fitted separately.

`own` is a correction factor of each kind, relative to the average of all kinds, by size; for a kind
that was not measured it is 1.

Source: rounds and bytes of the algorithms for short and for long messages in Thakur, Rabenseifner
and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4; mmap
threshold in the manual of the GNU C library, "Tunable parameters of malloc".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, log2

import numpy as np
from numpy.typing import NDArray

from sbp_core.calibration.curve import segments
from sbp_core.calibration.nonnegative import solve
from sbp_core.calibration.sample import MeasuredCase, Measurement

#: Sizes in bytes at which the rate of `moving` may change.
_KNOTS_BYTES = (0, 2**12, 2**16, 2**20, 2**23)

#: Candidates for T, in bytes; the first is the threshold of the GNU C library.
_FRESH_BYTES = (2**25, 2**17, 2**20, 2**23, 2**26, 2**27, 2**28)

#: Weight that pulls rates towards 0, which the samples may leave open.
_RIDGE = 1e-3

#: Iterations from least squares of relative errors to least squares of logarithms.
_REWEIGHTINGS = 4


def volumes(kind: str, n: int, S: float) -> tuple[float, float]:  # noqa: N803
    """Return the bytes that one rank sends, and the bytes of its result.

    Args:
        kind: One of `CALL_KINDS`.
        n: Ranks of the group.
        S: Bytes that they share.
    """
    if kind == "transfer":
        return S, S
    if kind == "all-to-all":
        return (n - 1) * S / n**2, S / n
    sent = (n - 1) * S / n
    return (2 * sent if kind == "all-reduce" else sent), S / n if kind == "reduce-scatter" else S


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmFamily:
    """The time model of one family of calls: the collectives, or the transfers.

    Args:
        by_sent: Whether x is b, and not S.
        fresh_bytes: T.
        rates: One for each column of `_columns`, in seconds or seconds per byte, >= 0.
        own: For each measured kind: points (log x, log own), x ascending.
    """

    by_sent: bool
    fresh_bytes: int
    rates: tuple[float, ...]
    own: Mapping[str, Sequence[tuple[float, float]]]

    @classmethod
    def fit(cls, samples: Sequence[Measurement]) -> AlgorithmFamily:
        """Fit the model to samples, of which there is at least one."""
        first, *others = _FRESH_BYTES
        tried = [_fit(samples, by_sent, first) for by_sent in (True, False)]
        best = min(tried, key=lambda found: found[0])
        tried = [best, *(_fit(samples, best[1].by_sent, fresh_bytes) for fresh_bytes in others)]
        family = min(tried, key=lambda found: found[0])[1]
        octaves: dict[str, dict[int, list[tuple[float, float]]]] = {}
        for sample in samples:
            size = family._size(sample.case, sample.shared_bytes)
            ratio = sample.time_s / family.time_s(sample.case, sample.shared_bytes)
            points = octaves.setdefault(sample.kind, defaultdict(list))
            points[round(log2(size))].append((log(size), log(ratio)))
        own = {
            kind: [tuple(np.mean(of[octave], axis=0).tolist()) for octave in sorted(of)]
            for kind, of in octaves.items()
        }
        return replace(family, own=own)

    def time_s(self, case: MeasuredCase, shared_bytes: float) -> float:
        """Return the time of a call, in seconds."""
        columns = _columns(case, shared_bytes, self.by_sent, self.fresh_bytes)
        time_s = float(columns @ np.asarray(self.rates))
        if case.kind in self.own:
            sizes, ratios = zip(*self.own[case.kind], strict=True)
            time_s *= exp(float(np.interp(log(self._size(case, shared_bytes)), sizes, ratios)))
        return time_s

    def _size(self, case: MeasuredCase, shared_bytes: float) -> float:
        """Return x, at least one byte."""
        return max(1.0, _size(case, shared_bytes, self.by_sent))


class TransportModel:
    """Predicts the time of any call on a transport, fitted to at least one sample."""

    def __init__(self, samples: Sequence[Measurement]) -> None:
        families: dict[bool, list[Measurement]] = defaultdict(list)
        for sample in samples:
            families[sample.kind == "transfer"].append(sample)
        self._families = {messages: AlgorithmFamily.fit(of) for messages, of in families.items()}

    def time_s(self, case: MeasuredCase, shared_bytes: float) -> float:
        """Return the time of a call, in seconds."""
        messages = case.kind == "transfer"
        # Better a guess from the other family than none.
        family = self._families.get(messages) or self._families[not messages]
        return family.time_s(case, shared_bytes)

    def knows(self, kind: str) -> bool:
        """Return whether there were samples of a kind."""
        return any(kind in family.own for family in self._families.values())


def _size(case: MeasuredCase, shared_bytes: float, by_sent: bool) -> float:
    return volumes(case.kind, case.group_size, shared_bytes)[0] if by_sent else shared_bytes


def _columns(
    case: MeasuredCase, shared_bytes: float, by_sent: bool, fresh_bytes: int
) -> NDArray[np.float64]:
    """Return the coefficient of each rate in the time of a call: (rates,), float64."""
    n = case.group_size
    _, result = volumes(case.kind, n, shared_bytes)
    size = np.array([_size(case, shared_bytes, by_sent)])
    fresh = result if result >= fresh_bytes else 0.0
    alone = np.array([1.0, (n - 1).bit_length(), *segments(size, _KNOTS_BYTES)[0], fresh])
    return np.concatenate([alone, alone * n * case.concurrent_groups])


def _fit(
    samples: Sequence[Measurement], by_sent: bool, fresh_bytes: int
) -> tuple[float, AlgorithmFamily]:
    """Return the remaining error with the best rates, and the family with these rates."""
    times = np.array([sample.time_s for sample in samples])
    rows = [_columns(of.case, of.shared_bytes, by_sent, fresh_bytes) for of in samples]
    matrix = np.vstack(rows) / times[:, None]
    weights = np.ones(len(times))
    for _ in range(_REWEIGHTINGS):
        weighted = matrix * weights[:, None]
        ridge = np.diag(_RIDGE * np.sqrt((weighted**2).sum(axis=0)))
        target = np.concatenate([weights, np.zeros(len(ridge))])
        rates = solve(np.vstack([weighted, ridge]), target)
        logs = np.log(np.maximum(matrix @ rates, 1e-3))
        # With these weights, a relative error counts as much as the error of the logarithm.
        errors = np.expm1(logs)
        weights = np.where(np.abs(errors) < 1e-6, 1.0, logs / errors)
    family = AlgorithmFamily(
        by_sent=by_sent, fresh_bytes=fresh_bytes, rates=tuple(rates.tolist()), own={}
    )
    return float(np.square(logs).mean()), family
