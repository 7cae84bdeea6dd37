"""What a list of indices means, as in `x[i, :, j]` or `x[mask]`; and reading by one.

The indices are broadcast together, to dims `b0 b1`, which stand in the result where the first of
them stood, or in front if a dim that is not indexed lies between them. Dims that are not indexed
are free (`d1`), those that are indexed are windows (`v0`). A mask stands for as many dims as it
has, and makes one whose extent only the data tell. Writing is in `index_put`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sbp_aten.rules.windows import (
    given,
    is_cut,
    lookup_reduction,
    only_zeros,
    readable,
    wrapped,
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
    linear,
    run_as_is,
)

#: Why dims stay whole that a mask reads, and those that it makes.
DATA = "a mask makes as many elements as it has true ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """One of the indices.

    Args:
        slot: Position in the list of indices.
        tensor: Position among the tensor arguments.
        dims: Dims of the indexed tensor that it stands for: one, but for masks.
        shape: Its shape.
        mask: Whether it is a mask.
    """

    slot: int
    tensor: int
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    mask: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexing:
    """What a list of indices does to a tensor.

    Args:
        indices: Those that are given.
        free: Dims of the tensor that are not indexed.
        at: How many of these stand in the result before the dims that the indices make.
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
            # A mask is indexed by all its dims at once; `uint8` is how masks were written before
            # `bool`.
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
        # NumPy's rule. `at` counts free dims in front of what the indices make:
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
        """How many dims the indices make."""
        return max(1 if index.mask else len(index.shape) for index in self.indices)

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the dims that the indices make, if none is a mask."""
        # Broadcast: aligned at the last dim, an extent of 1 gives way to any other.
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
        """Return the dims of what is read or written: free ones, with those made among them."""
        free: list[Dim] = [(f"d{dim}",) for dim in self.free]
        return (*free[: self.at], *self.made(), *free[self.at :])

    def of_index(self, index: Index) -> Dims:
        """Return the dims of one index: labels of its own if one of the indices is a mask."""
        if self.masked:
            return fresh_dims(len(index.shape), f"t{index.slot}_")
        extents = self.extents[self.num_made - len(index.shape) :]
        dims = self.made()[self.num_made - len(index.shape) :]
        # What is broadcast along a dim has one element there: label-free, so it is not split.
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
        """Return the indices of dims that a rank has a window of."""
        return [
            index
            for index in self.indices
            if not index.mask and is_cut(bounds[index.dims[0]], shape[index.dims[0]])
        ]


def right_aligned(shape: Sequence[int], wide: Sequence[int], dims: Dims) -> Dims:
    """Return the dims of a tensor that is broadcast to a shape with given dims."""
    behind = len(dims) - len(shape)
    return tuple(
        () if here == 1 != extent else dim
        for here, extent, dim in zip(shape, wide[behind:], dims[behind:], strict=True)
    )


def _index(call: OpCall) -> Notation:
    """Return `v0 d1, b0 => b0 d1` for `x[i]`."""
    made = call.outputs[0]
    indexing = Indexing.of(call, 1, 1)
    return Notation(
        inputs=(indexing.tensor(), *map(indexing.of_index, indexing.indices)),
        outputs=(indexing.result(),),
        dependences=(linear(0), increasing(0)),
        whole=indexing.whole(),
        reductions=_reductions(indexing, call),
        work_flop=float(prod(made.shape)),
        why=DATA if indexing.masked else "",
    )


def _reductions(indexing: Indexing, call: OpCall) -> tuple[tuple[str, str], ...]:
    kind = lookup_reduction(call.outputs[0])
    return tuple((f"v{dim}", kind) for index in indexing.indices for dim in index.dims)


def _index_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Read what lies in the windows of all dims that are indexed."""
    (tensor, entries), _ = given(call, ("self", "indices"))
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    indexing = Indexing.of(call, 1, 1)
    cut = indexing.cut(shape, bounds)
    if not cut:
        return run_as_is(call)
    if any(bounds[dim][0] == bounds[dim][1] for index in cut for dim in index.dims):
        return only_zeros(tensor, shards.output_shape())
    builder = LocalProgramBuilder()
    local = list(entries)
    outside: list[Ref] = []
    for index in cut:
        (dim,) = index.dims
        place = wrapped(builder, entries[index.slot], shape[dim])
        local[index.slot], beyond = readable(builder, place, bounds[dim])
        outside.append(beyond)
    # Every place is read, those outside of the window at element 0 of it, and overwritten with
    # zeros: shapes stay static, and the sum over the ranks has each element once.
    found = builder(call.op, tensor, tuple(local))
    behind = len(indexing.free) - indexing.at
    return builder.program(without(builder, found, outside, behind, 0))


def without(
    builder: LocalProgramBuilder, found: Ref, outside: Sequence[Ref], behind: int, fill: object
) -> Ref:
    """Fill what lies outside of a window; `behind`: dims of the result behind those made."""
    # `beyond` has the dims that the indices make; it is aligned with them by new dims behind.
    for beyond in outside:
        for _ in range(behind):
            beyond = builder("aten.unsqueeze.default", beyond, -1)
        found = builder("aten.masked_fill.Scalar", found, beyond, fill)
    return found


def _masked_index(call: OpCall) -> Notation:
    """Return `v0 d1, b0 d1, b0 => b0 d1`: an element where the mask holds, else a number."""
    made = call.outputs[0].shape
    indexing = Indexing.of(call, 2, 2)
    result = indexing.result()
    mask = right_aligned(call.inputs[1].shape, made, result)
    filled = argument(call, 3, "fill") != 0
    return Notation(
        inputs=(indexing.tensor(), mask, *map(indexing.of_index, indexing.indices)),
        outputs=(result,),
        dependences=(increasing(0),) if filled else (linear(0), increasing(0)),
        whole=indexing.whole(),
        reductions=_reductions(indexing, call),
        work_flop=float(prod(made)),
        why=DATA if indexing.masked else "",
    )


def clamped(builder: LocalProgramBuilder, index: Ref, extent: int) -> Ref:
    """Return an index as the `_unsafe_masked_*` operators take it: counted from the front.

    What lies beyond either end means the last element there.
    """
    return wrapped(builder, builder("aten.clamp.default", index, -extent, extent - 1), extent)


def _masked_index_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Read what lies in the windows; the number that fills the rest is given by the first rank."""
    (tensor, mask, entries, fill), _ = given(call, ("self", "mask", "indices", "fill"))
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    indexing = Indexing.of(call, 2, 2)
    cut = indexing.cut(shape, bounds)
    if not cut:
        return run_as_is(call)
    # Ranks add up what they find, so the number that stands where the mask does not hold must come
    # from one rank only: that of the first window. The others fill zeros.
    first = all(bounds[dim][0] == 0 < bounds[dim][1] for index in cut for dim in index.dims)
    if any(bounds[dim][0] == bounds[dim][1] for index in cut for dim in index.dims):
        return only_zeros(tensor, shards.output_shape())
    builder = LocalProgramBuilder()
    local = list(entries)
    outside: list[Ref] = []
    for index in cut:
        (dim,) = index.dims
        place = clamped(builder, entries[index.slot], shape[dim])
        local[index.slot], beyond = readable(builder, place, bounds[dim])
        outside.append(beyond)
    found = builder("aten._unsafe_masked_index.default", tensor, mask, tuple(local), 0)
    found = without(builder, found, outside, len(indexing.free) - indexing.at, 0)
    if first and fill != 0:
        beside = builder("aten.logical_not.default", mask)
        found = builder("aten.masked_fill.Scalar", found, beside, fill)
    return builder.program(found)


RULES = {
    "aten._unsafe_index.Tensor": Rule(_index, _index_shard),
    "aten._unsafe_masked_index.default": Rule(_masked_index, _masked_index_shard),
    "aten.index.Tensor": Rule(_index, _index_shard),
}
