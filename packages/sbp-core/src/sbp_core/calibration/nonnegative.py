"""Solve least squares with coefficients >= 0 (NNLS), for fits of times: no cost is negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_TOLERANCE = 1e-10


def solve(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the x >= 0 that minimises |matrix · x - target|.

    Args:
        matrix: (rows, columns), float64.
        target: (rows,), float64.

    Returns:
        (columns,), float64.

    Source: Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23.
    """
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    gram, moment = scaled.T @ scaled, scaled.T @ target
    at_once = _unconstrained(gram, moment)
    if (at_once >= 0).all():
        return np.asarray(at_once / scale, dtype=np.float64)
    x = np.zeros(len(moment))
    free = np.zeros(len(moment), dtype=bool)
    limit = _TOLERANCE * max(1.0, float(np.abs(moment).max(initial=0.0)))
    for _ in range(3 * len(moment)):
        gradient = np.where(free, -np.inf, moment - gram @ x)
        if gradient.max(initial=-np.inf) <= limit:
            break
        free[int(gradient.argmax())] = True
        x = _step_inside(gram, moment, x, free)
    return np.asarray(x / scale, dtype=np.float64)


def _unconstrained(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the unconstrained optimum, the shortest one if there are several."""
    return np.asarray(np.linalg.lstsq(gram, moment, rcond=None)[0], dtype=np.float64)


def _step_inside(
    gram: NDArray[np.float64],
    moment: NDArray[np.float64],
    x: NDArray[np.float64],
    free: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Move to the optimum of the free coefficients; fix coefficients that would become negative."""
    while True:
        best = np.zeros(len(x))
        at = np.flatnonzero(free)
        best[at] = _unconstrained(gram[np.ix_(at, at)], moment[at])
        negative = free & (best <= 0)
        if not negative.any():
            return best
        ratio = np.full(len(x), np.inf)
        ratio[negative] = x[negative] / np.maximum(x[negative] - best[negative], 1e-300)
        x = np.where(free, x + ratio.min() * (best - x), 0.0)
        x[int(ratio.argmin())] = 0.0
        free &= x > 0
