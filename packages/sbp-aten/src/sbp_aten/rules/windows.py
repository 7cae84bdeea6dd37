"""Helpers to read and write by index if a rank holds only a window (range) of the indexed rows.

A read returns zeros for rows of other ranks, so the results of the ranks add up to the whole. A
write to such a row is redirected to a spare row after the window, which is cut off afterwards. Used
by the modules of rules; it holds no rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.graph import Argument, Ref, TensorType
from sbp_core.signatures import Bounds, LocalProgram, LocalProgramBuilder, OpCall, Range, argument


def is_cut(window: Range, extent: int) -> bool:
    """Return whether a rank holds less than all of a dim."""
    return window != (0, extent)


def length(window: Range) -> int:
    """Return the number of rows in a window."""
    return window[1] - window[0]


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """Return the shape of a shard."""
    return tuple(map(length, bounds))


def lookup_reduction(entry: TensorType) -> str:
    """Return the reduction that combines reads from windows: sum, or disjunction for booleans."""
    return "max" if entry.dtype == "bool" else "sum"


def wrapped(builder: LocalProgramBuilder, index: Ref, extent: int) -> Ref:
    """Convert negative indices (counted from the end) to indices counted from the front."""
    return builder("aten.remainder.Scalar", index, extent)


def inside(builder: LocalProgramBuilder, index: Ref, window: Range) -> tuple[Ref, Ref]:
    """Return an index counted from the window's first row, and a mask of places outside of it.

    The first window subtracts 0, so that its rank runs the same calls as all other ranks: ranks
    with the same calls are compiled, ordered, checked and measured once.
    """
    local = builder("aten.sub.Tensor", index, window[0])
    before = builder("aten.lt.Scalar", local, 0)
    behind = builder("aten.ge.Scalar", local, length(window))
    return local, builder("aten.logical_or.default", before, behind)


def readable(builder: LocalProgramBuilder, index: Ref, window: Range) -> tuple[Ref, Ref]:
    """Return an index into the window, 0 for places outside, and a mask of these places."""
    local, outside = inside(builder, index, window)
    return builder("aten.masked_fill.Scalar", local, outside, 0), outside


def writable(builder: LocalProgramBuilder, index: Ref, window: Range) -> Ref:
    """Return an index into the window; the spare row after it for places outside."""
    local, outside = inside(builder, index, window)
    return builder("aten.masked_fill.Scalar", local, outside, length(window))


def only_zeros(like: Ref, shape: Sequence[int]) -> LocalProgram:
    """Return the program of a rank without rows: zeros."""
    builder = LocalProgramBuilder()
    return builder.program(builder("aten.new_zeros.default", like, tuple(shape)))


def with_spare(
    builder: LocalProgramBuilder, tensor: Ref, dims: Sequence[int], num_dims: int
) -> Ref:
    """Append a row of zeros to a tensor at the end of each of some dims."""
    padding = [0] * (2 * num_dims)
    for dim in dims:
        padding[2 * (num_dims - 1 - dim) + 1] = 1
    return builder("aten.constant_pad_nd.default", tensor, tuple(padding), 0)


def without_spare(builder: LocalProgramBuilder, tensor: Ref, windows: Mapping[int, Range]) -> Ref:
    """Cut the spare row off each dim that has one."""
    for dim, window in windows.items():
        tensor = builder("aten.slice.Tensor", tensor, dim, 0, length(window))
    return tensor


def given(call: OpCall, names: Sequence[str]) -> tuple[list[Argument], dict[str, Argument]]:
    """Return the arguments `names`, first in the schema, by position; other keywords by name.

    Positional arguments after them stay positional.
    """
    first = [argument(call, index, name) for index, name in enumerate(names)]
    rest = call.args[len(names) :]
    return [*first, *rest], {key: value for key, value in call.kwargs.items() if key not in names}
