"""Cut a tensor into slices, and see whether slices make up one, each element once.

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

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from sbp_core.boxing import Bounds

#: Most dims of a tensor.
MOST_DIMS = 64

#: Most cuts inside each other; a layout has one for each mesh axis and dim, and one for blocks.
_DEEPEST = 64


def cut(shape: Sequence[int], item_bytes: int, block_bytes: int) -> Iterator[Bounds]:
    """Yield blocks of a tensor that are each one run of its bytes, in their order.

    Rows are taken together as far as a block holds them; where one alone is too large, it is cut
    up likewise.

    Args:
        shape: Of the tensor.
        item_bytes: Of an element.
        block_bytes: Most bytes of a block, >= `item_bytes`.
    """
    dim, inner = len(shape), item_bytes  # the first dim of which a block may have several rows
    while dim and inner * shape[dim - 1] <= block_bytes:
        dim -= 1
        inner *= shape[dim]
    if not dim or 0 in shape:
        yield tuple((0, extent) for extent in shape)
        return
    rows = max(1, block_bytes // inner)
    tail = tuple((0, extent) for extent in shape[dim:])
    for outer in product(*(range(extent) for extent in shape[: dim - 1])):
        head = tuple((index, index + 1) for index in outer)
        for start in range(0, shape[dim - 1], rows):
            yield (*head, (start, min(start + rows, shape[dim - 1])), *tail)


def can_be(shape: Sequence[int]) -> bool:
    """Whether there can be a tensor of a shape: strides of an empty one may be too large, too."""
    is_plain = len(shape) <= MOST_DIMS and min(shape, default=0) >= 0
    return is_plain and prod(max(extent, 1) for extent in shape) < 2**60


def within(inner: Bounds, outer: Sequence[tuple[int, int]]) -> Bounds:
    """Return the bounds of a slice as counted from the start of another one."""
    pairs = zip(inner, outer, strict=True)
    return tuple((start - first, stop - first) for (start, stop), (first, _) in pairs)


def index_of(bounds: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Return the index of a slice, as tensors take it."""
    return tuple(slice(*dim) for dim in bounds)


def bounds_text(bounds: Sequence[tuple[int, int]]) -> str:
    """Return a slice as Python writes it: `[0:4, 2:3]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


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
