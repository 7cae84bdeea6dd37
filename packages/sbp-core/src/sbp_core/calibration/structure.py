"""The time of any call, also of one that was never measured, from what its algorithm does.

n ranks of a group, g groups at once, S bytes that a group shares (see `Sample`). Each rank sends a
message of m bytes in each of r rounds, adds v bytes up and copies k bytes:

    kind             r         m        v           k
    all-reduce       2 (n-1)   S / n    (n-1) S/n   S
    reduce-scatter   n - 1     S / n    (n-1) S/n   S
    all-gather       n - 1     S / n    0           S
    all-to-all       n - 1     S / n²   0           2 S / n
    transfer         1         S        0           2 S

    time = call + r · message(m) + adding · v + copying · k + whole · g S + own(kind)

`message` is a latency and a piecewise linear rate. Each of these has a part that one rank feels
alone, and a part that grows with the n · g ranks at work (they share cores, memory bus or link).
`whole` is for transports in which one rank does the work of all. `own` is what a kind takes beyond
the others, a latency and a rate over r m: transports do not do all kinds equally well, and a kind
that was not measured has none. All rates are >= 0 and found by least squares over all samples,
relative to the measured times; rates of a kind are held small, so that they explain only what the
common ones cannot.

Source: rounds of the ring and of pairwise exchange as in Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp_core.calibration.curve import segments
from sbp_core.calibration.nonnegative import solve
from sbp_core.calibration.sample import Case, Sample

#: Where the rate of a message may change, in bytes.
_KNOTS_BYTES = (0, 2**12, 2**16, 2**20, 2**23)

#: Weights that pull rates towards 0: common ones, which the samples may leave open, and those of a
#: kind. The second is the best of 0.03, 0.1 and 0.3 for cases left out on a loaded machine with two
#: cores (gloo, MPI and threads); there is little between them.
_RIDGE, _OWN_RIDGE = 1e-3, 0.3

#: Rates of one kind.
_NUM_OWN = 4


def rounds(kind: str, n: int, S: float) -> tuple[int, float, float, float]:  # noqa: N803
    """Return (rounds, bytes of a message, bytes added up, bytes copied) of one rank.

    Args:
        kind: One of `KINDS`.
        n: Ranks of the group.
        S: Bytes that they share.
    """
    if kind == "transfer":
        return 1, S, 0.0, 2 * S
    if kind == "all-to-all":
        return n - 1, S / n**2, 0.0, 2 * S / n
    added = 0.0 if kind == "all-gather" else (n - 1) * S / n
    return (2 if kind == "all-reduce" else 1) * (n - 1), S / n, added, S


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The rates of a transport, in seconds or seconds per byte, >= 0.

    Args:
        common: One for each column of `_columns`.
        own: Of each kind that was measured, one for each column of `_own_columns`.
    """

    common: tuple[float, ...]
    own: Mapping[str, tuple[float, ...]]

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Structure:
        """Find the rates that explain these samples, of which there is at least one."""
        kinds = sorted({sample.kind for sample in samples})
        times = np.array([sample.time_s for sample in samples])
        common = np.vstack([_columns(sample.case, sample.shared_bytes) for sample in samples])
        own = np.zeros((len(samples), len(kinds), _NUM_OWN))
        for row, sample in enumerate(samples):
            own[row, kinds.index(sample.kind)] = _own_columns(sample.case, sample.shared_bytes)
        matrix = np.hstack([common, own.reshape(len(samples), -1)]) / times[:, None]
        weights = np.full(matrix.shape[1], _OWN_RIDGE)
        weights[: common.shape[1]] = _RIDGE
        ridge = np.diag(weights * np.sqrt((matrix**2).sum(axis=0)))
        target = np.concatenate([np.ones(len(times)), np.zeros(len(ridge))])
        rates = solve(np.vstack([matrix, ridge]), target).tolist()
        split = common.shape[1]
        starts = range(split, len(rates), _NUM_OWN)
        return cls(
            common=tuple(rates[:split]),
            own={
                kind: tuple(rates[start : start + _NUM_OWN])
                for kind, start in zip(kinds, starts, strict=True)
            },
        )

    def time_s(self, case: Case, shared_bytes: float) -> float:
        """Return the time of a call, in seconds."""
        time_s = float(_columns(case, shared_bytes) @ np.asarray(self.common))
        if case.kind in self.own:
            time_s += float(_own_columns(case, shared_bytes) @ np.asarray(self.own[case.kind]))
        return time_s

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {
            "common": list(self.common),
            "own": {kind: list(rates) for kind, rates in self.own.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Structure:
        """Read what `to_json` wrote."""
        return cls(
            common=tuple(value["common"]),
            own={kind: tuple(rates) for kind, rates in value["own"].items()},
        )


def _columns(case: Case, shared_bytes: float) -> NDArray[np.float64]:
    """Return how often each common rate counts in a call: (rates,), float64."""
    r, m, v, k = rounds(case.kind, case.group_size, shared_bytes)
    parts = r * segments(np.array([m]), _KNOTS_BYTES)[0]
    alone = np.array([1.0, r, *parts, v, k])
    together = alone * case.group_size * case.concurrent_groups
    return np.concatenate([alone, together, [shared_bytes * case.concurrent_groups]])


def _own_columns(case: Case, shared_bytes: float) -> NDArray[np.float64]:
    """Return how often each rate of its kind counts in a call: (`_NUM_OWN`,), float64."""
    r, m, _, _ = rounds(case.kind, case.group_size, shared_bytes)
    ranks = case.group_size * case.concurrent_groups
    return np.array([1.0, ranks, r * m, r * m * ranks])
