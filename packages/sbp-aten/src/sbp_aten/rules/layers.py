"""Whole layers as one operator: transformer layers, and a linear layer with its cross entropy."""

from __future__ import annotations

from sbp_core.signatures import Notation, OpCall, Rule, argument, batch_notation

_LAYER = "attention mixes the positions, and products the features"
_CLASSES = "a softmax runs over the classes, and products over the features"


def _transformer(call: OpCall) -> Notation:
    """`b t! e!, weights => b t! e!`; with a mask, whose kinds differ in their dims, whole.

    `_native_multi_head_attention` begins with queries, keys and values, the encoder layer with one
    source.
    """
    encoder = "encoder" in call.op
    data = [0] if encoder else [0, 0, 0]
    masked = argument(call, *((18, "mask") if encoder else (9, "mask"))) is not None
    weights = [None] * (len(call.inputs) - len(data))
    return batch_notation(
        call,
        [*data, *weights, *[0] * len(call.outputs)],
        why="masks of each kind have dims of their own" if masked else _LAYER,
        free=not masked,
        nonempty=True,
    )


def _linear_cross_entropy(call: OpCall) -> Notation:
    """`n i!, c! i!, n => (), n i!, c! i!, c!` in sums; the mean of a batch needs it whole.

    Loss and gradients are made together; a gradient that is not wanted has no elements.
    """
    mean = argument(call, 5, "reduction") == "mean"
    wanted = argument(call, 12, "compute_input_grad")
    rest = [None] * (len(call.inputs) - 3)
    return batch_notation(
        call,
        [0, None, 0, *rest, None, 0 if wanted else None, None, None],
        why="a mean divides by the targets that count, of all shards" if mean else _CLASSES,
        free=not mean,
        nonempty=True,
    )


def _linear_cross_entropy_each(call: OpCall) -> Notation:
    """`n i!, c! i!, n => n`: a loss for each row."""
    rest = [None] * (len(call.inputs) - 3)
    return batch_notation(call, [0, None, 0, *rest, 0], why=_CLASSES, nonempty=True)


_CHUNKED = "torch_nn._linear_cross_entropy_batch_chunked"

RULES = {
    "aten._native_multi_head_attention.default": Rule(_transformer),
    "aten._transformer_encoder_layer_fwd.default": Rule(_transformer),
    f"{_CHUNKED}.default": Rule(_linear_cross_entropy),
    f"{_CHUNKED}_no_reduction.default": Rule(_linear_cross_entropy_each),
}
