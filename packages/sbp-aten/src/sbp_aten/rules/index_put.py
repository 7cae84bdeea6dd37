"""Writing by a list of indices, and into the flattened tensor: `index_put`, `put`.

    v0 d1, b0, b0 d1 => v0 d1    x[i] = values; see `advanced` for the dims

A rank that holds a window of an indexed dim redirects the updates of other windows to a spare row,
which it cuts off afterwards. So shapes do not depend on the values of indices:

    x has 6 rows, i = [4, 0, 5], and this rank holds rows 0 to 2:

        row 0 <- i[1]       local index [3, 0, 3]
        row 1
        row 2
        spare <- i[0], i[2]
"""

from __future__ import annotations

from math import prod

from sbp_aten.rules.advanced import DATA, Indexing, clamped, right_aligned
from sbp_aten.rules.indexing import flat_positions
from sbp_aten.rules.updates import Updates, combining, replacing
from sbp_aten.rules.windows import (
    given,
    shape_of,
    with_spare,
    without_spare,
    wrapped,
    writable,
)
from sbp_core.signatures import (
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
    run_as_is,
)

_MASKED = "aten._unsafe_masked_index_put_accumulate.default"


def _updates(call: OpCall, accumulate: bool, over: list[str]) -> Updates:
    """Return how updates combine with the tensor; their values are the last tensor argument."""
    values = len(call.inputs) - 1
    if accumulate:
        return combining("sum", call.inputs[0], values, over)
    return replacing(call.inputs[0], values, over)


def _put_notation(call: OpCall, indexing: Indexing, accumulate: bool, mask: bool) -> Notation:
    """Return the notation of a write; `mask`: an argument more says which values to write."""
    shape, values = call.inputs[0].shape, call.inputs[-1].shape
    result = indexing.result()
    made = [name for (name,) in indexing.made()]
    free = [shape[dim] for dim in indexing.free]
    broadcast = (*free[: indexing.at], *_extents(call, indexing), *free[indexing.at :])
    updates = _updates(call, accumulate, made)
    masks = [right_aligned(call.inputs[1].shape, broadcast, result)] if mask else []
    return Notation(
        inputs=(
            indexing.tensor(),
            *masks,
            *map(indexing.of_index, indexing.indices),
            right_aligned(values, broadcast, result),
        ),
        outputs=(indexing.tensor(),),
        dependences=updates.dependences,
        reductions=updates.reductions,
        beside=updates.beside,
        whole=updates.whole | indexing.whole(),
        why=DATA if indexing.masked else updates.why,
    )


def _extents(call: OpCall, indexing: Indexing) -> tuple[int, ...]:
    """Return extents of the dims that indices make; beside a mask, those of the values there."""
    if not indexing.masked:
        return indexing.extents
    behind = len(indexing.free) - indexing.at
    values = (1,) * (behind + indexing.num_made) + call.inputs[-1].shape
    return values[len(values) - behind - indexing.num_made : len(values) - behind]


def _fills_mask(call: OpCall, indexing: Indexing) -> Notation:
    """Return `m0 d1, m0, d1 => m0 d1`: one mask, and values that do not differ along it."""
    (index,) = indexing.indices
    values = call.inputs[-1].shape
    tensor: Dims = tuple(
        (f"m{dim}",) if dim in index.dims else (f"d{dim}",)
        for dim in range(len(call.inputs[0].shape))
    )
    free = [call.inputs[0].shape[dim] for dim in indexing.free]
    broadcast = (*free[: indexing.at], 1, *free[indexing.at :])
    aligned = right_aligned(values, broadcast, indexing.result())
    updates = _updates(call, bool(argument(call, 3, "accumulate", False)), [])
    return Notation(
        inputs=(
            tensor,
            tuple(tensor[dim] for dim in index.dims),
            tuple(() if dim == ("b0",) else dim for dim in aligned),
        ),
        outputs=(tensor,),
        dependences=updates.dependences,
    )


def _index_put(call: OpCall) -> Notation:
    indexing = Indexing.of(call, 1, 1)
    if [index.mask for index in indexing.indices] == [True] and set(_extents(call, indexing)) == {
        1
    }:
        return _fills_mask(call, indexing)
    return _put_notation(call, indexing, bool(argument(call, 3, "accumulate", False)), mask=False)


def _masked_put(call: OpCall) -> Notation:
    return _put_notation(call, Indexing.of(call, 2, 2), True, mask=True)


def _localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Redirect updates of other windows to a spare row of each dim that is cut and indexed."""
    masked = call.op == _MASKED
    names = ("self", "mask", "indices") if masked else ("self", "indices")
    arguments, named = given(call, (*names, "values"))
    target, *between, entries = arguments[: len(names)]
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    cut = Indexing.of(call, len(names) - 1, len(names) - 1).cut(shape, bounds)
    if not cut:
        return run_as_is(call)
    builder = LocalProgramBuilder()
    local = list(entries)
    for index in cut:
        (dim,) = index.dims
        front = (clamped if masked else wrapped)(builder, entries[index.slot], shape[dim])
        local[index.slot] = writable(builder, front, bounds[dim])
    windows = {dim: bounds[dim] for index in cut for dim in index.dims}
    target = with_spare(builder, target, list(windows), len(shape))
    made = builder(call.op, target, *between, tuple(local), *arguments[len(names) :], **named)
    return builder.program(without_spare(builder, made, windows))


def _put(call: OpCall) -> Notation:
    """Return `v0 v1, i0, i0 => v0 v1`: the tensor is written to as if it had one dim."""
    index, values = call.inputs[1].shape, call.inputs[2].shape
    target = fresh_dims(len(call.inputs[0].shape), "v")
    places = fresh_dims(len(index), "i")
    same = index == values
    updates = _updates(
        call, bool(argument(call, 3, "accumulate", False)), [name for (name,) in places]
    )
    others = () if same else fresh_dims(len(values), "s")
    own = () if same else (*places, *others)
    return Notation(
        inputs=(target, places, places if same else others),
        outputs=(target,),
        dependences=updates.dependences,
        reductions=() if own else updates.reductions,
        beside=() if own else updates.beside,
        whole=updates.whole | {name for (name,) in own},
        why=updates.why if same else "index and values differ in shape",
    )


def _localize_put(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Redirect updates of other shards to a spare element behind the flattened shard."""
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
    "aten._unsafe_index_put.default": Rule(_index_put, _localize),
    _MASKED: Rule(_masked_put, _localize),
    "aten.index_put.default": Rule(_index_put, _localize),
    "aten.put.default": Rule(_put, _localize_put),
}
