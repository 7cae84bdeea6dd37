"""Cut a tensor into slices, and check that slices cover a tensor, each element once.

The check accepts slices that straight cuts through the whole tensor separate recursively: for
example first between columns, then between the rows of each column. The slices of a layout are
always of this kind, even if the slice of a rank is cut into blocks. Manifests are checked so.

    +-----+---+        cut 1 separates the columns; then each column is
    |  a  | d |        cut between its own rows
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

#: Largest number of dims of a tensor.
MOST_DIMS = 64

#: Largest depth of nested cuts; a layout has one for each mesh axis and dim, and one for blocks.
_DEEPEST = 64


def split_into_blocks(shape: Sequence[int], item_bytes: int, block_bytes: int) -> Iterator[Bounds]:
    """Yield the blocks of a tensor, each one contiguous range of its bytes, in their order.

    A block has as many rows as fit into it. A row that is larger than a block is cut in the same
    way.

    Args:
        shape: Shape of the tensor.
        item_bytes: Bytes of an element.
        block_bytes: Largest size of a block, >= `item_bytes`.
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
    """Whether a tensor can have a shape; the strides of an empty tensor are limited, too."""
    is_plain = len(shape) <= MOST_DIMS and min(shape, default=0) >= 0
    return is_plain and prod(max(extent, 1) for extent in shape) < 2**60


def within(inner: Bounds, outer: Sequence[tuple[int, int]]) -> Bounds:
    """Return the bounds of a slice relative to the start of an outer slice."""
    pairs = zip(inner, outer, strict=True)
    return tuple((start - first, stop - first) for (start, stop), (first, _) in pairs)


def index_of(bounds: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Return the index of a slice for `tensor[...]`."""
    return tuple(slice(*dim) for dim in bounds)


def bounds_text(bounds: Sequence[tuple[int, int]]) -> str:
    """Return a slice in Python notation: `[0:4, 2:3]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


def covers(slices: Sequence[Bounds], shape: Sequence[int]) -> bool:
    """Whether slices cover a tensor, each element once, and straight cuts separate them.

    Args:
        slices: Slices of the tensor, (start, stop) of each dim.
        shape: Shape of the tensor; an empty tensor is covered by any slices.
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
        parts = _separate_slices(slices, dim)
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


def _separate_slices(slices: list[Bounds], dim: int) -> list[tuple[int, int, list[Bounds]]]:
    """Return groups of slices that no straight cut across a dim separates: start, stop, slices."""
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
