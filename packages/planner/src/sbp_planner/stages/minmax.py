"""The product of two matrices over (min, max), which composes stages whose slowest one counts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Rows of the right matrix at a time, so that what is worked on stays in the processor's cache.
_ROWS = 64

Floats = npt.NDArray[np.float64]


def minmax_product(left: Floats, right: Floats) -> Floats:
    """Return out[i, j] = min over k of max(left[i, k], right[k, j]).

    Args:
        left: Float (S, S), infinite on and below the diagonal.
        right: Float (S, S), infinite on and below the diagonal.

    Returns:
        Float (S, S), infinite on and below the diagonal.
    """
    size = len(left)
    out = np.full((size, size), np.inf)
    finite = right < np.inf
    # One beyond the last finite column of each row; 0 if there is none.
    ends = np.where(finite.any(axis=1), size - finite[:, ::-1].argmax(axis=1), 0)
    for i in range(size):
        ks = np.flatnonzero((left[i] < np.inf) & (ends > 0))
        for start in range(0, len(ks), _ROWS):
            rows = ks[start : start + _ROWS]
            columns = slice(rows[0] + 1, ends[rows].max())  # right[k] is infinite up to k
            worst = np.maximum(left[i, rows, None], right[rows, columns])
            np.minimum(out[i, columns], worst.min(axis=0), out=out[i, columns])
    return out
