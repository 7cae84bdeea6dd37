"""Writing by a list of indices, and into the flattened tensor: `index_put`, `put`.

    v0 d1, b0, b0 d1 => v0 d1    x[i] = values; see `advanced` for the dims

A rank that holds a window of a dim that is indexed drops the updates that go elsewhere.
"""

from __future__ import annotations

from math import prod

from sbp_aten.rules.advanced import DATA, Indexing, clamped, right_aligned
from sbp_aten.rules.indexing import flat_places
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
    Draft,
    LocalCall,
    LocalProgram,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    each,
    unchanged,
)

_MASKED = "aten._unsafe_masked_index_put_accumulate.default"


def _meeting(call: OpCall, accumulate: bool, over: list[str]) -> Updates:
    """Return what happens to updates; their values are the last tensor argument."""
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
    wide = (*free[: indexing.at], *_extents(call, indexing), *free[indexing.at :])
    updates = _meeting(call, accumulate, made)
    masks = [right_aligned(call.inputs[1].shape, wide, result)] if mask else []
    return Notation(
        inputs=(
            indexing.tensor(),
            *masks,
            *map(indexing.of_index, indexing.indices),
            right_aligned(values, wide, result),
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
    wide = (*free[: indexing.at], 1, *free[indexing.at :])
    kept = right_aligned(values, wide, indexing.result())
    updates = _meeting(call, bool(argument(call, 3, "accumulate", False)), [])
    return Notation(
        inputs=(
            tensor,
            tuple(tensor[dim] for dim in index.dims),
            tuple(() if dim == ("b0",) else dim for dim in kept),
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


def _shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Let updates that go elsewhere go to a spare row of each dim that is cut and indexed."""
    masked = call.op == _MASKED
    names = ("self", "mask", "indices") if masked else ("self", "indices")
    arguments, named = given(call, (*names, "values"))
    target, *between, entries = arguments[: len(names)]
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    cut = Indexing.of(call, len(names) - 1, len(names) - 1).cut(shape, bounds)
    if not cut:
        return unchanged(call)
    draft = Draft()
    local = list(entries)
    for index in cut:
        (dim,) = index.dims
        front = (clamped if masked else wrapped)(draft, entries[index.slot], shape[dim])
        local[index.slot] = writable(draft, front, bounds[dim])
    windows = {dim: bounds[dim] for index in cut for dim in index.dims}
    target = with_spare(draft, target, list(windows), len(shape))
    made = draft(call.op, target, *between, tuple(local), *arguments[len(names) :], **named)
    return draft.program(without_spare(draft, made, windows))


def _put(call: OpCall) -> Notation:
    """Return `v0 v1, i0, i0 => v0 v1`: the tensor is written to as if it had one dim."""
    index, values = call.inputs[1].shape, call.inputs[2].shape
    target = each(len(call.inputs[0].shape), "v")
    places = each(len(index), "i")
    same = index == values
    updates = _meeting(
        call, bool(argument(call, 3, "accumulate", False)), [name for (name,) in places]
    )
    others = () if same else each(len(values), "s")
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


def _put_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Let updates that go elsewhere go to a spare element behind the flattened shard."""
    (target, index, *rest), named = given(call, ("self", "index", "source"))
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    local = shape_of(bounds)
    if local == shape:
        return unchanged(call)
    draft = Draft()
    place, outside = flat_places(draft, index, shape, bounds)
    place = draft("aten.masked_fill.Scalar", place, outside, prod(local))
    flat = draft("aten.reshape.default", target, (prod(local),))
    flat = draft(call.op, with_spare(draft, flat, (0,), 1), place, *rest, **named)
    kept = draft("aten.slice.Tensor", flat, 0, 0, prod(local))
    return draft.program(draft("aten.view.default", kept, local))


RULES = {
    "aten._unsafe_index_put.default": Rule(_index_put, _shard),
    _MASKED: Rule(_masked_put, _shard),
    "aten.index_put.default": Rule(_index_put, _shard),
    "aten.put.default": Rule(_put, _put_shard),
}
