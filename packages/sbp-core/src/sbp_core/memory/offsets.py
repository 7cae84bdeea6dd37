"""Put buffers whose lifetimes are known into one arena: offsets, and how good they are. No torch.

Two buffers may share bytes iff they are not alive at the same time. To use the least is NP-hard, so
buffers are placed one by one in several orders, each into the lowest or the tightest gap between
those in its way, and the best result is kept.

    time ->      a: 0-1  b: 1-3  c: 2-3        offset
    a  ######                                  32   | a a . .
    b     #########                            16   | . . c c      c takes the place that a left
    c        ######                             0   | . b b b

Source: Pisarchyk and Lee, "Efficient memory management for deep neural net inference", MLSys
workshop 2020 (greedy by size and by breadth, as in TensorFlow Lite); the tightest gap is best-fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Offsets are multiples of this many bytes: a cache line, and what vector instructions like.
ALIGNMENT_BYTES = 64

_Array = npt.NDArray[np.int64]


class Interval(NamedTuple):
    """Bytes wanted from the tick `start` to the tick `end`, both included."""

    size_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where intervals lie in an arena.

    Args:
        offsets: In bytes, one for each interval.
        size_bytes: Of the arena.
        lower_bound: Most bytes alive at one time; no arena can be smaller.
        method: The order and choice of gap that gave it.
    """

    offsets: tuple[int, ...]
    size_bytes: int
    lower_bound: int
    method: str

    @property
    def excess(self) -> float:
        """How far above the lower bound it is: 0.05 is 5 %; 0 if nothing can be better."""
        return self.size_bytes / self.lower_bound - 1 if self.lower_bound else 0.0


def pack(intervals: Sequence[Interval]) -> Packing:
    """Return the best packing that some order of placing gives.

    That of a few lists is remembered: the ranks of a mesh often want the same.

    Args:
        intervals: Sizes >= 0; an end before its start is no lifetime at all.

    Raises:
        ValueError: a size is negative, or an interval ends before it starts.
    """
    return _packed(tuple(intervals))


@lru_cache(maxsize=8)
def _packed(intervals: tuple[Interval, ...]) -> Packing:
    for one in intervals:
        if one.size_bytes < 0 or one.end < one.start:
            raise ValueError(f"{one} is no interval of bytes")
    table = np.array(intervals, dtype=np.int64).reshape(len(intervals), 3)
    table[:, 0] = -(-table[:, 0] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    bound = _most_alive(table)
    best: Packing | None = None
    for name, key in _ORDERS.items():
        order = np.lexsort(key(table)[::-1])
        for gap, choose in _GAPS.items():
            offsets, size = _place(table, order, choose)
            if best is None or size < best.size_bytes:
                best = Packing(
                    offsets=tuple(offsets.tolist()),
                    size_bytes=size,
                    lower_bound=bound,
                    method=f"{name}, {gap}",
                )
            if best.size_bytes == bound:
                return best
    assert best is not None, "there are orders"
    return best


def _most_alive(table: _Array) -> int:
    """Return the most bytes alive at one time."""
    if not len(table):
        return 0
    change = np.zeros(int(table[:, 2].max()) + 2, dtype=np.int64)
    np.add.at(change, table[:, 1], table[:, 0])
    np.add.at(change, table[:, 2] + 1, -table[:, 0])
    return int(change.cumsum().max())


def _lengths(table: _Array) -> _Array:
    return table[:, 2] - table[:, 1] + 1


def _breadths(table: _Array) -> _Array:
    """Return for each interval the most bytes alive at one time in its life."""
    change = np.zeros(int(table[:, 2].max(initial=0)) + 2, dtype=np.int64)
    np.add.at(change, table[:, 1], table[:, 0])
    np.add.at(change, table[:, 2] + 1, -table[:, 0])
    alive = change.cumsum()
    found = [alive[start : end + 1].max() for _, start, end in table.tolist()]
    return np.array(found, dtype=np.int64)


#: Name of an order -> columns to sort by, the most important first.
_ORDERS: dict[str, Callable[[_Array], list[_Array]]] = {
    "by size": lambda table: [-table[:, 0], -_lengths(table), table[:, 1]],
    "by start": lambda table: [table[:, 1], -_lengths(table), -table[:, 0]],
    "by lifetime": lambda table: [-_lengths(table), -table[:, 0], table[:, 1]],
    "by area": lambda table: [-table[:, 0] * _lengths(table), table[:, 1]],
    "by breadth": lambda table: [-_breadths(table), -table[:, 0], table[:, 1]],
}


def _lowest(starts: _Array, room: _Array, size: int) -> int:
    """Return the first gap that is large enough."""
    return int(starts[int(np.argmax(room >= size))])


def _tightest(starts: _Array, room: _Array, size: int) -> int:
    """Return the smallest gap that is large enough, the lowest of several."""
    left = np.where(room >= size, room, np.iinfo(np.int64).max)
    return int(starts[int(np.argmin(left))])


_GAPS = {"tightest gap": _tightest, "lowest gap": _lowest}


def _place(
    table: _Array, order: _Array, choose: Callable[[_Array, _Array, int], int]
) -> tuple[_Array, int]:
    """Place the intervals in an order; return their offsets and the size of the arena."""
    count = len(table)
    offsets = np.zeros(count, dtype=np.int64)
    sizes, starts, ends = (np.ascontiguousarray(table[order, at]) for at in range(3))
    placed = np.zeros(count, dtype=np.int64)
    top = 0
    for turn in range(count):
        size, start, end = int(sizes[turn]), int(starts[turn]), int(ends[turn])
        in_way = (starts[:turn] <= end) & (ends[:turn] >= start) & (sizes[:turn] > 0)
        low = placed[:turn][in_way]
        by_offset = np.argsort(low, kind="stable")
        low = low[by_offset]
        high = np.maximum.accumulate(low + sizes[:turn][in_way][by_offset])
        floor = np.concatenate((np.zeros(1, dtype=np.int64), high))
        ceiling = np.concatenate((low, np.array([np.iinfo(np.int64).max // 2])))
        placed[turn] = choose(floor, ceiling - floor, size)
        top = max(top, int(placed[turn]) + size)
    offsets[order] = placed
    return offsets, top
