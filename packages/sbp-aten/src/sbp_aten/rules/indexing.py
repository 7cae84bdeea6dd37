"""Sharding rules of reading by index along one dim, or in the flattened tensor; embeddings.

    v d, i* => i* d        embedding(table, places); `v` are the rows of the vocabulary
    a v b, k => a k b      index_select(x, 1, index)
    v*, i* => i*           take(x, index)

Each element of the result is one of the elements read, so these operators are linear and
increasing. If the dim that is read is split, a rank reads the elements of its window (range of the
dim) and returns zeros for the rest: partial sums. The gradient of a row of an embedding comes from
the places that refer to it.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from math import prod

from sbp_aten.rules.formula import by_operator, notation, stated
from sbp_aten.rules.windows import (
    given,
    inside,
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
from sbp_core.graph import Argument, Ref
from sbp_core.signatures import (
    Bounds,
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    run_as_is,
    wrap_dim,
)


def _read(
    builder: LocalProgramBuilder,
    call: OpCall,
    shards: Shards,
    at: int,
    before: tuple[Argument, ...],
    index: Ref,
    behind: int = 0,
    **named: Argument,
) -> LocalProgram:
    """Return the program that reads the rows of a window of dim `at`; other places get zeros.

    Args:
        builder: The builder, with the calls so far.
        call: The reading call.
        shards: The shards of the rank.
        at: The dim of argument 0 that is read.
        before: Arguments before the index.
        index: The index, counting rows of the whole tensor.
        behind: Number of dims of the result after the dims of the index.
        **named: Arguments by name.
    """
    window = shards.inputs[0][at]
    if window[0] == window[1]:
        return only_zeros(before[0], shards.output_shape())
    local, outside = readable(builder, index, window)
    rows = builder(call.op, *before, local, **named)
    for _ in range(behind):
        outside = builder("aten.unsqueeze.default", outside, -1)
    return builder.program(builder("aten.masked_fill.Scalar", rows, outside, 0))


def _index_select(call: OpCall) -> Notation:
    """`a* v b*, k* => a* k* b*`: index and tensor may be 0-d."""
    shape, made = call.inputs[0].shape, call.outputs[0]
    if not shape:
        # The index has one place, without a dim in the result.
        why = "a number has to be read by each rank"
        return notation(call, f"(), k*! => (); linear 0; increasing 0; flop 1; why {why}")
    at = wrap_dim(argument(call, 1, "dim"), len(shape))
    dims = [f"d{dim}" for dim in range(len(shape))]
    before, behind = " ".join(dims[:at]), " ".join(dims[at + 1 :])
    places = " k0" if call.inputs[1].shape else ""
    return notation(
        call,
        f"{before} v {behind},{places} => {before}{places or ' 1'} {behind}; linear 0; increasing 0"
        f"; reduce v {lookup_reduction(made)}; flop {prod(made.shape)}",
    )


def _index_select_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    (tensor, dim, index), _ = given(call, ("self", "dim", "index"))
    shape = call.inputs[0].shape
    at = wrap_dim(dim, len(shape))
    if not shape or not is_cut(shards.inputs[0][at], shape[at]):
        return run_as_is(call)
    behind = len(shape) - at - 1
    return _read(LocalProgramBuilder(), call, shards, at, (tensor, at), index, behind=behind)


def _gather(call: OpCall) -> Notation:
    """Return `a v, a k => a k` for dim 1.

    If the index is shorter than the tensor in dims other than `dim`, the first elements are read:
    the tensor has to be whole there (`x!`), and a rank cuts out the part for its shard of the
    index.
    """
    shape, index, made = call.inputs[0].shape, call.inputs[1].shape, call.outputs[0]
    at = wrap_dim(argument(call, 1, "dim"), max(len(shape), 1))
    pairs = enumerate(zip(shape, index, strict=False))
    common = {dim for dim, (extent, other) in pairs if extent == other and dim != at}
    shared = {dim: f"d{dim}" for dim in common}
    tensor = ["v" if dim == at else shared.get(dim, f"x{dim}!") for dim in range(len(shape))]
    places = ["k" if dim == at else shared.get(dim, f"i{dim}") for dim in range(len(index))]
    reduction = f"; reduce v {lookup_reduction(made)}" if shape else ""
    read = " ".join(places)
    return notation(
        call,
        f"{' '.join(tensor) or '()'}, {read} => {read}; linear 0; increasing 0{reduction}"
        f"; flop {prod(made.shape)}; why the index is shorter than the tensor there",
    )


def _gather_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Cut the tensor to the index's shard in other dims, and read the rows of the window."""
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
    builder = LocalProgramBuilder()
    kept = tensor
    for other in cuts:
        tensor = builder("aten.slice.Tensor", tensor, other, *pieces[other])
    if not windowed:
        return builder.program(builder(call.op, tensor, at, index, **named))
    before = (kept if bounds[at][0] == bounds[at][1] else tensor, at)
    return _read(builder, call, shards, at, before, index, **named)


def flat_positions(
    builder: LocalProgramBuilder, index: Ref, shape: tuple[int, ...], bounds: Bounds
) -> tuple[Ref, Ref]:
    """Convert places in a flattened tensor to a flattened shard; also return which are outside.

    Args:
        builder: Collects the calls.
        index: Places in the flattened tensor, from the end if negative; any shape, integers.
        shape: Shape of the tensor.
        bounds: Bounds of the shard, which is smaller than the tensor.
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
    made = call.outputs[0]
    return notation(
        call,
        f"v*, i* => i*; linear 0; increasing 0; reduce v* {lookup_reduction(made)}; "
        f"flop {prod(made.shape)}",
    )


def _take_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Read the elements of the shard; zeros elsewhere."""
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


def _embedding(call: OpCall) -> Notation:
    work = prod(call.outputs[0].shape)
    touched = prod(call.inputs[1].shape)
    return notation(
        call, f"v d, i* => i* d; linear 0; increasing 0; touch v {touched}; flop {work}"
    )


def _embedding_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Look up the rows of the window. Forward ignores `padding_idx`."""
    if not is_cut(shards.inputs[0][0], call.inputs[0].shape[0]):
        return run_as_is(call)
    weight, indices = argument(call, 0, "weight"), argument(call, 1, "indices")
    return _read(LocalProgramBuilder(), call, shards, 0, (weight,), indices, behind=1)


def _embedding_backward(call: OpCall) -> Notation:
    """`i* d, i* => v d; linear 0`: each place adds its gradient to its row.

    `scale_grad_by_freq` needs the count of a row over all places, so they stay whole.
    """
    places = "i*!" if argument(call, 4, "scale_grad_by_freq", False) else "i*"
    why = "gradients are scaled by how often a row is named in all places"
    work = prod(call.inputs[0].shape)
    return notation(call, f"{places} d, {places} => v d; linear 0; flop {work}; why {why}")


def _embedding_backward_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Let places of other windows add to a spare row; places of the padding row add nothing."""
    names = ("grad_output", "indices", "num_weights", "padding_idx", "scale_grad_by_freq")
    (gradient, indices, _, padding, counts), _ = given(call, names)
    window = shards.outputs[0][0]
    if not is_cut(window, call.outputs[0].shape[0]):
        return run_as_is(call)
    first, last = window
    builder = LocalProgramBuilder()
    made = builder(
        "aten.embedding_dense_backward.default",
        gradient,
        writable(builder, indices, window),
        last - first + 1,
        padding - first if first <= padding < last else -1,
        counts,
    )
    return builder.program(without_spare(builder, made, {0: window}))


def _renorm_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Redirect places of other windows to a spare row of zeros, whose norm is small enough."""
    window = shards.inputs[0][0]
    if not is_cut(window, call.inputs[0].shape[0]):
        return run_as_is(call)
    (weight, indices, *norm), _ = given(call, ("self", "indices", "max_norm", "norm_type"))
    builder = LocalProgramBuilder()
    made = builder(
        "aten.embedding_renorm.default",
        with_spare(builder, weight, (0,), 2),
        writable(builder, indices, window),
        *norm,
    )
    return builder.program(without_spare(builder, made, {0: window}))


_RENORM = "v d!, i*! => v d!; why a row's norm runs over it, and any place may name the row"

RULES = by_operator(
    {
        "embedding": Rule(_embedding, _embedding_shard),
        "embedding_dense_backward": Rule(_embedding_backward, _embedding_backward_shard),
        "embedding_renorm": stated(_RENORM, _renorm_shard),
        "gather": Rule(_gather, _gather_shard),
        "index_select": Rule(_index_select, _index_select_shard),
        "take": Rule(_take, _take_shard),
    }
)
