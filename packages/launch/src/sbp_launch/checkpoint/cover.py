"""Whether slices make up a whole tensor, each element once.

The slices of a layout, also where a rank's slice is cut up further, can be parted by straight cuts
through the whole: between columns first, and then between the rows of each column.

    +-----+---+        cut 1 parts the columns; then each column is
    |  a  | d |        parted by its own rows
    +-----+   |
    |  b  +---+
    +-----+ e |
    |  c  |   |
    +-----+---+
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_core.boxing import Bounds

#: Most cuts inside each other; a layout has one for each mesh axis and dim, and one for blocks.
_DEEPEST = 64


def covers(slices: Sequence[Bounds], shape: Sequence[int]) -> bool:
    """Whether slices make up a tensor, each element once; parted by straight cuts.

    Args:
        slices: Each inside of `shape`, with a dim for each of it.
        shape: Of the tensor; whatever slices of an empty one make it up.
    """
    if 0 in shape:
        return True
    return _covers(list(slices), tuple((0, extent) for extent in shape), _DEEPEST)


def _covers(slices: list[Bounds], whole: Bounds, depth: int) -> bool:
    if len(slices) == 1:
        return slices[0] == whole
    if not depth:
        return False
    for dim, (start, stop) in enumerate(whole):
        parts = _parted(slices, dim)
        if len(parts) == 1:
            continue
        for first, last, inside in parts:
            if first != start:
                return False
            start = last
            part = (*whole[:dim], (first, last), *whole[dim + 1 :])
            if not _covers(inside, part, depth - 1):
                return False
        return start == stop
    return False


def _parted(slices: list[Bounds], dim: int) -> list[tuple[int, int, list[Bounds]]]:
    """Return groups of slices that no straight cut across a dim parts: start, stop, the slices."""
    groups: list[tuple[int, int, list[Bounds]]] = []
    for bounds in sorted(slices, key=lambda bounds: bounds[dim]):
        start, stop = bounds[dim]
        if groups and start < groups[-1][1]:
            first, last, inside = groups[-1]
            inside.append(bounds)
            groups[-1] = (first, max(last, stop), inside)
        else:
            groups.append((start, stop, [bounds]))
    return groups
