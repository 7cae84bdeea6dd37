"""Reading by index along one dim, or in the flattened tensor: `gather`, `index_select`, `take`.

Each element of the result is one of the elements read, so these are linear and increasing. A rank
that holds a window of the dim that is read reads what it has and gives zeros for the rest.
"""

from __future__ import annotations

from math import prod

from sbp_aten.rules.windows import (
    given,
    inside,
    is_cut,
    lookup_reduction,
    only_zeros,
    readable,
    shape_of,
    wrapped,
)
from sbp_core.graph import Ref
from sbp_core.signatures import (
    Bounds,
    Dim,
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
    wrap_dim,
)


def _index_select(call: OpCall) -> Notation:
    """Return `a v b, k => a k b` for dim 1."""
    shape, index, made = call.inputs[0].shape, call.inputs[1].shape, call.outputs[0]
    at = wrap_dim(argument(call, 1, "dim"), len(shape))
    dims = fresh_dims(len(shape))
    places = fresh_dims(len(index), "k")
    # A tensor without dims is read by an index of one place, which no dim of the result is for.
    stays = () if shape else places
    return Notation(
        inputs=((*dims[:at], *((("v",),) if shape else ()), *dims[at + 1 :]), places),
        outputs=((*dims[:at], *((places or ((),)) if shape else ()), *dims[at + 1 :]),),
        dependences=(linear(0), increasing(0)),
        whole=frozenset(name for dim in stays for name in dim),
        reductions=(("v", lookup_reduction(made)),) if shape else (),
        work_flop=float(prod(made.shape)),
        why="a number has to be read by each rank" if stays else "",
    )


def _index_select_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Read the rows of the window."""
    (tensor, dim, index), _ = given(call, ("self", "dim", "index"))
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    at = wrap_dim(dim, len(shape))
    if not shape or not is_cut(bounds[at], shape[at]):
        return run_as_is(call)
    if bounds[at][0] == bounds[at][1]:
        return only_zeros(tensor, shards.output_shape())
    builder = LocalProgramBuilder()
    local, outside = readable(builder, index, bounds[at])
    rows = builder(call.op, tensor, at, local)
    for _ in shape[at + 1 :]:
        outside = builder("aten.unsqueeze.default", outside, -1)
    return builder.program(builder("aten.masked_fill.Scalar", rows, outside, 0))


def _gather(call: OpCall) -> Notation:
    """Return `a v, a k => a k` for dim 1.

    Where the index is shorter than the tensor beside `dim`, the first elements are read: the tensor
    has to be whole there (`x!`), and a rank cuts from it what its piece of the index is for.
    """
    shape, index, made = call.inputs[0].shape, call.inputs[1].shape, call.outputs[0]
    at = wrap_dim(argument(call, 1, "dim"), max(len(shape), 1))
    common = {
        dim
        for dim, (extent, other) in enumerate(zip(shape, index, strict=False))
        if extent == other and dim != at
    }
    tensor: list[Dim] = [
        ("v" if dim == at else f"d{dim}" if dim in common else f"x{dim}",)
        for dim in range(len(shape))
    ]
    places: list[Dim] = [
        ("k" if dim == at else f"d{dim}" if dim in common else f"i{dim}",)
        for dim in range(len(index))
    ]
    longer = [name for (name,) in tensor if name.startswith("x")]
    return Notation(
        inputs=(tuple(tensor), tuple(places)),
        outputs=(tuple(places),),
        dependences=(linear(0), increasing(0)),
        whole=frozenset(longer),
        reductions=(("v", lookup_reduction(made)),) if shape else (),
        work_flop=float(prod(made.shape)),
        why="the index is shorter than the tensor there" if longer else "",
    )


def _gather_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Cut the tensor to the piece of the index beside `dim`, and read the rows of the window."""
    (tensor, dim, index), named = given(call, ("self", "dim", "index"))
    shape, places = call.inputs[0].shape, call.inputs[1].shape
    bounds, pieces = shards.inputs
    at = wrap_dim(dim, max(len(shape), 1))
    cuts = [
        other
        for other in range(min(len(shape), len(places)))
        if other != at and shape[other] != places[other] and is_cut(pieces[other], places[other])
    ]
    windowed = bool(shape) and is_cut(bounds[at], shape[at])
    if (not cuts and not windowed) or 0 in places:
        return run_as_is(call)
    if windowed and bounds[at][0] == bounds[at][1]:
        return only_zeros(tensor, shards.output_shape())
    builder = LocalProgramBuilder()
    for other in cuts:
        tensor = builder("aten.slice.Tensor", tensor, other, *pieces[other])
    if not windowed:
        return builder.program(builder(call.op, tensor, at, index, **named))
    local, outside = readable(builder, index, bounds[at])
    rows = builder(call.op, tensor, at, local, **named)
    return builder.program(builder("aten.masked_fill.Scalar", rows, outside, 0))


def flat_positions(
    builder: LocalProgramBuilder, index: Ref, shape: tuple[int, ...], bounds: Bounds
) -> tuple[Ref, Ref]:
    """Return places in a flattened tensor as places in a flattened shard, and which lie outside.

    Args:
        builder: Takes the calls.
        index: Places in the flattened tensor, from behind if negative; any shape, integers.
        shape: Shape of the tensor.
        bounds: Bounds of the shard, which is smaller.
    """
    index = wrapped(builder, index, prod(shape))
    local = shape_of(bounds)
    total: Ref | None = None
    beyond: Ref | None = None
    for dim, window in enumerate(bounds):
        row = builder("aten.div.Tensor_mode", index, prod(shape[dim + 1 :]), rounding_mode="floor")
        row = builder("aten.remainder.Scalar", row, shape[dim])
        if is_cut(window, shape[dim]):
            row, outside = inside(builder, row, window)
            beyond = (
                outside if beyond is None else builder("aten.logical_or.default", beyond, outside)
            )
        term = builder("aten.mul.Tensor", row, prod(local[dim + 1 :]))
        total = term if total is None else builder("aten.add.Tensor", total, term)
    assert total is not None and beyond is not None, "the shard is as large as the tensor"
    return total, beyond


def _take(call: OpCall) -> Notation:
    """Return `v0 v1, i0 => i0`: the tensor is read as if it had one dim."""
    shape, made = call.inputs[0].shape, call.outputs[0]
    places = fresh_dims(len(made.shape), "i")
    tensor = fresh_dims(len(shape), "v")
    reduction = lookup_reduction(made)
    return Notation(
        inputs=(tensor, places),
        outputs=(places,),
        dependences=(linear(0), increasing(0)),
        reductions=tuple((name, reduction) for (name,) in tensor),
        work_flop=float(prod(made.shape)),
    )


def _take_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Read the elements that the shard has."""
    (tensor, index), _ = given(call, ("self", "index"))
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    local = shape_of(bounds)
    if local == shape:
        return run_as_is(call)
    if 0 in local:
        return only_zeros(tensor, shards.output_shape())
    builder = LocalProgramBuilder()
    place, outside = flat_positions(builder, index, shape, bounds)
    place = builder("aten.masked_fill.Scalar", place, outside, 0)
    found = builder("aten.take.default", tensor, place)
    return builder.program(builder("aten.masked_fill.Scalar", found, outside, 0))


RULES = {
    "aten.gather.default": Rule(_gather, _gather_shard),
    "aten.index_select.default": Rule(_index_select, _index_select_shard),
    "aten.take.default": Rule(_take, _take_shard),
}
