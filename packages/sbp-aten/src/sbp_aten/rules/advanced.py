"""Sharding rules of reading and writing by lists of indices, as in `x[i, :, j]` or `x[mask]`.

The indices are broadcast together, to dims `b0 b1`. In the result these are in place of the first
index, or in front if a dim that is not indexed is between the indices. Dims that are not indexed
can be split (`d1`); of indexed dims (`v0`), a rank holds a range, its window. A mask stands for as
many dims as it has, and makes one dim whose extent depends on the data. In notation
(`sbp_core.signatures.notation`):

    v0 d1, b0, b0 d1 => v0 d1    x[i] = values
    v*, i*, i* => v*             put: into the flattened tensor

A rank that holds a window of an indexed dim redirects the updates of other windows to a spare row,
which it cuts off afterwards. So shapes do not depend on the values of indices:

    x has 6 rows, i = [4, 0, 5], and this rank holds rows 0 to 2:

        row 0 <- i[1]       local index [3, 0, 3]
        row 1
        row 2
        spare <- i[0], i[2]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from sbp_aten.rules.formula import notation
from sbp_aten.rules.indexing import flat_positions
from sbp_aten.rules.scatter import Updates, combining, replacing
from sbp_aten.rules.windows import (
    given,
    is_cut,
    lookup_reduction,
    only_zeros,
    readable,
    shape_of,
    with_spare,
    without_spare,
    wrapped,
    writable,
)
from sbp_core.graph import Ref
from sbp_core.signatures import (
    Bounds,
    Dim,
    Dims,
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    fresh_dims,
    increasing,
    labels,
    linear,
    run_as_is,
)

#: Reason why the dims that a mask reads or makes stay whole.
_DATA = "a mask selects as many elements as it has true values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An index in a list of indices.

    Args:
        slot: Position in the list of indices.
        tensor: Position among the tensor arguments.
        dims: Dims of the tensor that it indexes: one, or several for a mask.
        shape: Shape of the index.
        mask: Whether it is a mask.
    """

    slot: int
    tensor: int
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    mask: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexing:
    """The effect of a list of indices on the dims of a tensor.

    Args:
        indices: The indices that are not None.
        free: Dims of the tensor that are not indexed.
        at: Number of free dims in the result before the dims made by the indices.
    """

    indices: tuple[Index, ...]
    free: tuple[int, ...]
    at: int

    @classmethod
    def of(cls, call: OpCall, position: int, tensor: int) -> Indexing:
        """Read the list of indices of a call.

        Args:
            call: The call; the tensor that is indexed is its first argument.
            position: Position of the list among the arguments.
            tensor: Position of its first tensor among the tensor arguments.
        """
        found: list[Index] = []
        free: list[int] = []
        dim = 0
        for slot, entry in enumerate(argument(call, position, "indices")):
            if entry is None:
                free.append(dim)
                dim += 1
                continue
            given_type = call.inputs[tensor + len(found)]
            # A mask indexes all its dims at once; `uint8` was the dtype of masks before `bool`.
            mask = given_type.dtype in ("bool", "uint8")
            count = len(given_type.shape) if mask else 1
            found.append(
                Index(
                    slot=slot,
                    tensor=tensor + len(found),
                    dims=tuple(range(dim, dim + count)),
                    shape=given_type.shape,
                    mask=mask,
                )
            )
            dim += count
        free += range(dim, len(call.inputs[0].shape))
        # NumPy's rule. `at` counts free dims in front of the dims made by indices:
        #
        #     x[:, i, j]    adjacent     d0 b0       at 1
        #     x[i, :, j]    not so       b0 d1       at 0: in front of everything
        slots = [index.slot for index in found]
        adjacent = slots == list(range(slots[0], slots[-1] + 1))
        at = sum(dim < found[0].dims[0] for dim in free) if adjacent and found[0].dims else 0
        return cls(indices=tuple(found), free=tuple(free), at=at)

    @property
    def masked(self) -> bool:
        """Whether one of the indices is a mask."""
        return any(index.mask for index in self.indices)

    @property
    def num_made(self) -> int:
        """Number of dims that the indices make."""
        return max(1 if index.mask else len(index.shape) for index in self.indices)

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the dims that the indices make, if none is a mask."""
        # Broadcast: aligned at the last dim, an extent of 1 is expanded to any other.
        shapes = [(1,) * (self.num_made - len(index.shape)) + index.shape for index in self.indices]
        return tuple(
            next((extent for extent in column if extent != 1), 1)
            for column in zip(*shapes, strict=True)
        )

    def tensor(self) -> Dims:
        """Return the dims of the tensor that is indexed."""
        count = len(self.free) + sum(len(index.dims) for index in self.indices)
        return tuple((f"d{dim}" if dim in self.free else f"v{dim}",) for dim in range(count))

    def made(self) -> Dims:
        """Return the dims that the indices make."""
        return fresh_dims(self.num_made, "b")

    def result(self) -> Dims:
        """Return the dims of the elements read or written: free dims, and dims of the indices."""
        free: list[Dim] = [(f"d{dim}",) for dim in self.free]
        return (*free[: self.at], *self.made(), *free[self.at :])

    def of_index(self, index: Index) -> Dims:
        """Return the dims of one index: separate labels if one of the indices is a mask."""
        if self.masked:
            return fresh_dims(len(index.shape), f"t{index.slot}_")
        extents = self.extents[self.num_made - len(index.shape) :]
        dims = self.made()[self.num_made - len(index.shape) :]
        # A broadcast dim has one element: it has no label, so it is not split.
        return tuple(
            () if here == 1 != wide else dim
            for dim, here, wide in zip(dims, index.shape, extents, strict=True)
        )

    def whole(self) -> frozenset[str]:
        """Return the labels that a mask keeps whole."""
        if not self.masked:
            return frozenset()
        own = [*self.made(), *(dim for index in self.indices for dim in self.of_index(index))]
        read = {f"v{dim}" for index in self.indices if index.mask for dim in index.dims}
        return frozenset(name for dim in own for name in dim) | read

    def cut(self, shape: Sequence[int], bounds: Bounds) -> list[Index]:
        """Return the indices of dims of which a rank holds only a window."""
        return [
            index
            for index in self.indices
            if not index.mask and is_cut(bounds[index.dims[0]], shape[index.dims[0]])
        ]


def _right_aligned(shape: Sequence[int], wide: Sequence[int], dims: Dims) -> Dims:
    """Return the dims of a tensor that is broadcast to a shape with given dims."""
    behind = len(dims) - len(shape)
    return tuple(
        () if here == 1 != extent else dim
        for here, extent, dim in zip(shape, wide[behind:], dims[behind:], strict=True)
    )


# Reading

#: Operators with an additional mask of the elements to read or write.
_MASKED = "aten._unsafe_masked_index.default"
_MASKED_PUT = "aten._unsafe_masked_index_put_accumulate.default"


def _index(call: OpCall) -> Notation:
    """Return `v0 d1, b0 => b0 d1` for `x[i]`.

    Masked: `v0 d1, b0 d1, b0 => b0 d1`, an element where the mask is True, else a number.
    """
    made, masked = call.outputs[0], call.op == _MASKED
    indexing = Indexing.of(call, 1 + masked, 1 + masked)
    result = indexing.result()
    masks = [_right_aligned(call.inputs[1].shape, made.shape, result)] if masked else []
    filled = masked and argument(call, 3, "fill") != 0
    return Notation(
        inputs=(indexing.tensor(), *masks, *map(indexing.of_index, indexing.indices)),
        outputs=(result,),
        dependences=(increasing(0),) if filled else (linear(0), increasing(0)),
        whole=indexing.whole(),
        reductions=tuple(
            (f"v{dim}", lookup_reduction(made)) for index in indexing.indices for dim in index.dims
        ),
        work_flop=float(prod(made.shape)),
        why=_DATA if indexing.masked else "",
    )


def _clamped(builder: LocalProgramBuilder, index: Ref, extent: int) -> Ref:
    """Return an index as the `_unsafe_masked_*` operators read it: counted from the front.

    An index beyond either end is clamped.
    """
    return wrapped(builder, builder("aten.clamp.default", index, -extent, extent - 1), extent)


def _index_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Read the elements that are in the windows of all indexed dims.

    With a mask, the first rank provides the fill number.
    """
    masked = call.op == _MASKED
    names = ("self", "mask", "indices", "fill") if masked else ("self", "indices")
    (tensor, *masks), _ = given(call, names)
    entries = masks.pop(1 if masked else 0)
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    indexing = Indexing.of(call, 1 + masked, 1 + masked)
    cut = indexing.cut(shape, bounds)
    if not cut:
        return run_as_is(call)
    windows = [bounds[dim] for index in cut for dim in index.dims]
    if any(first == last for first, last in windows):
        return only_zeros(tensor, shards.output_shape())
    builder, local, outside = LocalProgramBuilder(), list(entries), list[Ref]()
    for index, window in zip(cut, windows, strict=True):
        front = (_clamped if masked else wrapped)(
            builder, entries[index.slot], shape[index.dims[0]]
        )
        local[index.slot], beyond = readable(builder, front, window)
        outside.append(beyond)
    # Every place is read. Places outside of the window read its element 0, and are overwritten with
    # zeros: shapes stay static, and the sum over the ranks has each element once.
    found = builder(call.op, tensor, *masks[:1], tuple(local), *[0] * masked)
    for beyond in outside:
        # `beyond` has the dims made by the indices; new dims after them align it.
        for _ in range(len(indexing.free) - indexing.at):
            beyond = builder("aten.unsqueeze.default", beyond, -1)
        found = builder("aten.masked_fill.Scalar", found, beyond, 0)
    # The results of the ranks are added, so the fill number for places outside of the mask must
    # come from one rank only: the rank of the first window. Other ranks fill in zeros.
    if masked and masks[1] != 0 and all(first == 0 for first, _ in windows):
        beside = builder("aten.logical_not.default", masks[0])
        found = builder("aten.masked_fill.Scalar", found, beside, masks[1])
    return builder.program(found)


# Writing


def _updates(call: OpCall, over: list[str]) -> Updates:
    """Return how updates combine with the tensor; their values are the last tensor argument."""
    values = len(call.inputs) - 1
    if call.op == _MASKED_PUT or argument(call, 3, "accumulate", False):
        return combining("sum", call.inputs[0], values, over)
    return replacing(call.inputs[0], values, over)


def _index_put(call: OpCall) -> Notation:
    """Return the notation of a write; an additional argument may be a mask of values to write."""
    at = 2 if call.op == _MASKED_PUT else 1
    indexing = Indexing.of(call, at, at)
    shape, values = call.inputs[0].shape, call.inputs[-1].shape
    result, free = indexing.result(), [shape[dim] for dim in indexing.free]
    extents = indexing.extents if not indexing.masked else ()
    if indexing.masked:
        # With a mask, the dims made by indices are the dims of the values there.
        behind = len(free) - indexing.at
        padded = (1,) * (behind + indexing.num_made) + values
        extents = padded[len(padded) - behind - indexing.num_made : len(padded) - behind]
    wide = (*free[: indexing.at], *extents, *free[indexing.at :])
    aligned = _right_aligned(values, wide, result)
    if at == 1 and [index.mask for index in indexing.indices] == [True] and set(extents) == {1}:
        # `m0 d1, m0, d1 => m0 d1`: one mask, and values that are constant along it.
        (index,) = indexing.indices
        tensor = tuple(
            (f"m{dim}" if dim in index.dims else f"d{dim}",) for dim in range(len(shape))
        )
        mask = tuple(tensor[dim] for dim in index.dims)
        return Notation(
            inputs=(tensor, mask, tuple(() if dim == ("b0",) else dim for dim in aligned)),
            outputs=(tensor,),
            dependences=_updates(call, []).dependences,
        )
    updates = _updates(call, [name for (name,) in indexing.made()])
    masks = [_right_aligned(call.inputs[1].shape, wide, result)] if at == 2 else []
    indices = map(indexing.of_index, indexing.indices)
    inputs = (indexing.tensor(), *masks, *indices, aligned)
    return updates.notation(inputs, indexing.whole(), _DATA * indexing.masked)


def _index_put_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Redirect updates of other windows to a spare row of each indexed dim that is cut."""
    masked = call.op == _MASKED_PUT
    names = ("self", "mask", "indices") if masked else ("self", "indices")
    arguments, named = given(call, (*names, "values"))
    target, *between, entries = arguments[: len(names)]
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    cut = Indexing.of(call, len(names) - 1, len(names) - 1).cut(shape, bounds)
    if not cut:
        return run_as_is(call)
    builder, local = LocalProgramBuilder(), list(entries)
    for index in cut:
        (dim,) = index.dims
        front = (_clamped if masked else wrapped)(builder, entries[index.slot], shape[dim])
        local[index.slot] = writable(builder, front, bounds[dim])
    windows = {dim: bounds[dim] for index in cut for dim in index.dims}
    target = with_spare(builder, target, list(windows), len(shape))
    made = builder(call.op, target, *between, tuple(local), *arguments[len(names) :], **named)
    return builder.program(without_spare(builder, made, windows))


def _put(call: OpCall) -> Notation:
    """Return `v*, i*, i* => v*`: the tensor is written as if it had one dim."""
    updates = _updates(call, [*labels("i", len(call.inputs[1].shape))])
    if call.inputs[1].shape != call.inputs[2].shape:
        found = notation(call, "v*, i*!, s*! => v*; why index and values differ in shape")
        return replace(found, dependences=updates.dependences)
    return updates.notation(notation(call, "v*, i*, i* => v*").inputs)


def _localize_put(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Redirect updates of other shards to a spare element after the flattened shard."""
    (target, index, *rest), named = given(call, ("self", "index", "source"))
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    local = shape_of(bounds)
    if local == shape:
        return run_as_is(call)
    builder = LocalProgramBuilder()
    place, outside = flat_positions(builder, index, shape, bounds)
    place = builder("aten.masked_fill.Scalar", place, outside, prod(local))
    flat = builder("aten.reshape.default", target, (prod(local),))
    flat = builder(call.op, with_spare(builder, flat, (0,), 1), place, *rest, **named)
    written = builder("aten.slice.Tensor", flat, 0, 0, prod(local))
    return builder.program(builder("aten.view.default", written, local))


RULES = {
    "aten._unsafe_index.Tensor": Rule(_index, _index_shard),
    "aten._unsafe_index_put.default": Rule(_index_put, _index_put_shard),
    _MASKED: Rule(_index, _index_shard),
    _MASKED_PUT: Rule(_index_put, _index_put_shard),
    "aten.index.Tensor": Rule(_index, _index_shard),
    "aten.index_put.default": Rule(_index_put, _index_put_shard),
    "aten.put.default": Rule(_put, _localize_put),
}
