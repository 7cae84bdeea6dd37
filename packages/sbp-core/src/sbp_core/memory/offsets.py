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


#: Name of an order -> columns to sort by, the most important first. Those that most often reach the
#: lower bound come first, as nothing is tried after that.
_ORDERS: dict[str, Callable[[_Array], list[_Array]]] = {
    "by size": lambda table: [-table[:, 0], -_lengths(table), table[:, 1]],
    "by breadth": lambda table: [-_breadths(table), -table[:, 0], table[:, 1]],
    "by start": lambda table: [table[:, 1], -_lengths(table), -table[:, 0]],
    "by lifetime": lambda table: [-_lengths(table), -table[:, 0], table[:, 1]],
    "by area": lambda table: [-table[:, 0] * _lengths(table), table[:, 1]],
}

#: More than any offset, and than any tick.
_BEYOND = int(np.iinfo(np.int64).max // 2)


def _lowest(room: _Array, size: int) -> int:
    """Return the first gap that is large enough."""
    return int(np.argmax(room >= size))


def _tightest(room: _Array, size: int) -> int:
    """Return the smallest gap that is large enough, the lowest of several."""
    return int(np.argmin(np.where(room >= size, room, _BEYOND + 1)))


_GAPS = {"tightest gap": _tightest, "lowest gap": _lowest}


def _place(
    table: _Array, order: _Array, choose: Callable[[_Array, int], int]
) -> tuple[_Array, int]:
    """Place the intervals in an order; return their offsets and the size of the arena."""
    offsets = np.zeros(len(table), dtype=np.int64)
    # What is placed, sorted by offset: first and last tick, first byte, and the one after the last.
    # The ground and the sky are always there, so that every gap lies between two neighbours.
    placed = np.empty((4, len(table) + 2), dtype=np.int64)
    placed[:, 0] = -1, _BEYOND, 0, 0
    placed[:, 1] = -1, _BEYOND, _BEYOND, _BEYOND
    count, top = 2, 0
    for at, (size, start, end) in zip(order.tolist(), table[order].tolist(), strict=True):
        starts, ends, lows, highs = placed[:, :count]
        in_way = np.flatnonzero((starts <= end) & (ends >= start))
        floors = np.maximum.accumulate(highs[in_way[:-1]])
        found = int(floors[choose(lows[in_way[1:]] - floors, size)])
        offsets[at] = found
        if size:
            top = max(top, found + size)
            here = int(lows.searchsorted(found, side="right"))
            placed[:, here + 1 : count + 1] = placed[:, here:count].copy()
            placed[:, here] = start, end, found, found + size
            count += 1
    return offsets, top
