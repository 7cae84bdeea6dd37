"""Reading and writing by index if a rank holds a window of the indexed rows.

A read gives zeros for rows of other ranks, so that the ranks' results add up to the whole. A write
to such a row goes to a spare row after the window, which is cut off afterwards. This module has no
rules.
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
    """Return how reads from windows combine: by a sum; for booleans, by a disjunction."""
    return "max" if entry.dtype == "bool" else "sum"


def wrapped(builder: LocalProgramBuilder, index: Ref, extent: int) -> Ref:
    """Return an index counted from the front, given one that may be negative."""
    return builder("aten.remainder.Scalar", index, extent)


def inside(builder: LocalProgramBuilder, index: Ref, window: Range) -> tuple[Ref, Ref]:
    """Return an index counted from the window's first row, and where it points outside of it.

    The first window subtracts 0, so that all ranks run the same program, which is compiled,
    ordered, checked and measured once.
    """
    local = builder("aten.sub.Tensor", index, window[0])
    before = builder("aten.lt.Scalar", local, 0)
    behind = builder("aten.ge.Scalar", local, length(window))
    return local, builder("aten.logical_or.default", before, behind)


def readable(builder: LocalProgramBuilder, index: Ref, window: Range) -> tuple[Ref, Ref]:
    """Return an index into the window, 0 where it points outside, and where it does."""
    local, outside = inside(builder, index, window)
    return builder("aten.masked_fill.Scalar", local, outside, 0), outside


def writable(builder: LocalProgramBuilder, index: Ref, window: Range) -> Ref:
    """Return an index into the window; where it points outside, to the spare row after it."""
    local, outside = inside(builder, index, window)
    return builder("aten.masked_fill.Scalar", local, outside, length(window))


def only_zeros(like: Ref, shape: Sequence[int]) -> LocalProgram:
    """Return the program of a rank that holds no row to read from."""
    builder = LocalProgramBuilder()
    return builder.program(builder("aten.new_zeros.default", like, tuple(shape)))


def with_spare(
    builder: LocalProgramBuilder, tensor: Ref, dims: Sequence[int], num_dims: int
) -> Ref:
    """Return a tensor with one more row, of zeros, after each of some dims."""
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
    """Return the leading arguments of the schema by position, and all others by name.

    Later arguments that are given by position stay after them.
    """
    first = [argument(call, index, name) for index, name in enumerate(names)]
    rest = call.args[len(names) :]
    return [*first, *rest], {key: value for key, value in call.kwargs.items() if key not in names}
