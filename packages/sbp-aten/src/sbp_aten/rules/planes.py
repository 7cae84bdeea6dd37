"""Flat indices into a plane of spatial dims, and into the shard of it that a rank holds.

Pooling counts the elements of a plane row by row. Holds no rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from sbp_core.graph import Ref
from sbp_core.signatures import Bounds, LocalProgramBuilder

#: For each spatial dim the half-open bounds of the shard, and the extent of the whole.
Plane = Sequence[tuple[int, int, int]]


def spatial(bounds: Bounds, count: int) -> tuple[int, ...]:
    """Return the local extents of the last dims."""
    return tuple(stop - start for start, stop in bounds[-count:])


def plane(bounds: Bounds, shape: Sequence[int], count: int) -> Plane:
    """Return where the last `count` dims of a shard lie."""
    return [(*pair, extent) for pair, extent in zip(bounds[-count:], shape[-count:], strict=True)]


def is_whole(plane: Plane) -> bool:
    """Return whether a shard is all of the plane."""
    return all(start == 0 and stop == extent for start, stop, extent in plane)


def moved(builder: LocalProgramBuilder, indices: Ref, plane: Plane, into: bool) -> Ref:
    """Add the calls that turn indices into a shard to indices into the plane, or back.

    Args:
        builder: What the calls are added to.
        indices: Flat indices (int64).
        plane: For each spatial dim the bounds of the shard and the extent of the whole.
        into: Whether indices into the plane become such into the shard.
    """
    before = [extent if into else stop - start for start, stop, extent in plane]
    after = [stop - start if into else extent for start, stop, extent in plane]
    shift = [-start if into else start for start, _, _ in plane]
    if before[1:] == after[1:]:
        return builder("aten.add.Scalar", indices, shift[0] * prod(after[1:]))
    total: Ref | None = None
    for at in range(len(plane)):
        place = builder("aten.floor_divide.Scalar", indices, prod(before[at + 1 :]))
        place = builder("aten.remainder.Scalar", place, before[at])
        place = builder("aten.add.Scalar", place, shift[at])
        place = builder("aten.mul.Scalar", place, prod(after[at + 1 :]))
        total = place if total is None else builder("aten.add.Tensor", total, place)
    return total or indices
