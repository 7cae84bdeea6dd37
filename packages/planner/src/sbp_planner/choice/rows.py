"""Memory rows: the few times at which the limit of memory can bind.

Memory is held in intervals, so only what lives together counts:

    node a   =======            times  0 1 2 3 4 5 6
    node b     =======          a time matters if a node was born there, and one dies before the
    node c             ===      next is born: of the nodes live at other times, all live at such a
    rows         ^     ^        time together
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sbp_planner.choice.problem import Ints


def memory_rows(intervals: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Return the times that matter, and where each interval lies among them.

    Args:
        intervals: Half-open lifetimes; empty where start >= end.

    Returns:
        times: Rising, int64.
        spans: Of each interval the half-open range of `times` in it, int64 of shape (n, 2).
    """
    spans = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    live = spans[:, 0] < spans[:, 1]
    starts = np.unique(spans[live, 0])
    ends = np.unique(spans[live, 1])
    if not len(starts):
        return starts, np.zeros_like(spans)
    # Number of deaths up to each birth; it must rise until the next birth (or the end).
    before = np.searchsorted(ends, starts, side="right")
    times = starts[np.diff(before, append=len(ends)) > 0]
    rows = np.stack(
        [np.searchsorted(times, spans[:, 0]), np.searchsorted(times, spans[:, 1])], axis=1
    )
    rows[~live] = 0
    return times, rows
