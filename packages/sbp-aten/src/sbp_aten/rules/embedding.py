"""Embeddings: rows of a table, looked up by index.

A rank that holds a window of the vocabulary looks up what it has and gives zeros for the rest:
`v d, i0 i1 => i0 i1 d`, partial in `v`. The gradient of its rows comes from the places that name
them.
"""

from __future__ import annotations

from math import prod

from sbp_aten.rules.windows import (
    given,
    is_cut,
    only_zeros,
    readable,
    with_spare,
    without_spare,
    writable,
)
from sbp_core.signatures import (
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


def _embedding(call: OpCall) -> Notation:
    """Return `v d, i0 i1 => i0 i1 d; linear 0; increasing 0`."""
    places = fresh_dims(len(call.inputs[1].shape), "i")
    return Notation(
        inputs=((("v",), ("d",)), places),
        outputs=((*places, ("d",)),),
        dependences=(linear(0), increasing(0)),
        work_flop=float(prod(call.outputs[0].shape)),
    )


def _embedding_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Look up the rows of the window; other places get zeros. Forward ignores `padding_idx`."""
    weight, indices = argument(call, 0, "weight"), argument(call, 1, "indices")
    window = shards.inputs[0][0]
    if not is_cut(window, call.inputs[0].shape[0]):
        return run_as_is(call)
    if window[0] == window[1]:
        return only_zeros(weight, shards.output_shape())
    builder = LocalProgramBuilder()
    local, outside = readable(builder, indices, window)
    rows = builder("aten.embedding.default", weight, local)
    beside = builder("aten.unsqueeze.default", outside, -1)
    return builder.program(builder("aten.masked_fill.Scalar", rows, beside, 0))


def _embedding_backward(call: OpCall) -> Notation:
    """Return `i0 i1 d, i0 i1 => v d; linear 0`: each place adds its gradient to its row.

    With `scale_grad_by_freq` the count of a row over all places matters, so they stay whole.
    """
    names = list(labels("i", len(call.inputs[1].shape)))
    places = fresh_dims(len(names), "i")
    counts = bool(argument(call, 4, "scale_grad_by_freq", False))
    return Notation(
        inputs=((*places, ("d",)), places),
        outputs=((("v",), ("d",)),),
        dependences=(linear(0),),
        whole=frozenset(names) if counts else frozenset(),
        work_flop=float(prod(call.inputs[0].shape)),
        why="gradients are scaled by how often a row is named in all places" if counts else "",
    )


def _embedding_backward_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Let places of other windows add to a spare row; no place of the padding row adds anything."""
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
    """Let places of other windows name a spare row of zeros, whose norm is small enough."""
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


def _renorm(call: OpCall) -> Notation:
    """Return `v d!, i0! i1! => v d!`: rows that are named are scaled down to a norm."""
    names = list(labels("i", len(call.inputs[1].shape)))
    table = (("v",), ("d",))
    return Notation(
        inputs=(table, fresh_dims(len(names), "i")),
        outputs=(table,),
        whole=frozenset(["d", *names]),
        why="a row's norm runs over it, and any place may name the row",
    )


RULES = {
    "aten.embedding.default": Rule(_embedding, _embedding_shard),
    "aten.embedding_dense_backward.default": Rule(_embedding_backward, _embedding_backward_shard),
    "aten.embedding_renorm.default": Rule(_renorm, _renorm_shard),
}
