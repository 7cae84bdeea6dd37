"""Sharding rules of whole layers as one operator: recurrent networks, transformers, and a loss.

Batches may be split. Time may not (a chain of steps), and gates may not (chunks of one dim).
Tensors of data have the batch dim, weights do not, and gradients of biases are sums over it. The
loss is a product fused with its cross-entropy.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from sbp_aten.rules.formula import by_operator
from sbp_core.signatures import (
    Notation,
    OpCall,
    Rule,
    argument,
    batch_notation,
    batched,
    linear,
    opaque,
)

_GATES = "the gates of a step are chunks of one dim, which products mix"
_CHAIN = f"each step needs the one before, and {_GATES}"
_BUFFER = "the backward reads a buffer without a documented layout"
_ONEDNN = f"{_BUFFER}; with torch.backends.mkldnn disabled, the layer is captured as products"
_LAYER = "attention mixes the positions, and products the features"
_CLASSES = "a softmax runs over the classes, and products over the features"


def _network(call: OpCall) -> Notation:
    """`lstm.input` and alike: `t! b+ i!, l! b+ h!, weights => t! b+ o!, l! b+ h!`.

    oneDNN, which computes the LSTM on CPUs, refuses an empty batch.
    """
    num_states = len(call.outputs) - 1
    data = 0 if argument(call, 8, "batch_first", False) else 1
    states = [1] * num_states
    weights = [None] * (len(call.inputs) - 1 - num_states)
    drops = bool(argument(call, 6, "train")) and argument(call, 5, "dropout") != 0
    return batch_notation(
        call,
        [data, *states, *weights, data, *states],
        why="a shard would drop other elements" if drops else _CHAIN,
        free=not drops,
        nonempty=True,
    )


def _cell(call: OpCall) -> Notation:
    """`lstm_cell` and alike: `b i!, b h!, weights => b h!`."""
    num_states = len(call.outputs)
    weights = [None] * (len(call.inputs) - 1 - num_states)
    return batch_notation(call, [0, *[0] * num_states, *weights, *[0] * num_states], why=_GATES)


def _lstm_gradient(call: OpCall) -> Notation:
    """`b h!, b h!, b h!, b h!, b g! => b g!, b h!, g!`, linear in the gradients that are given."""
    gradients = (argument(call, 0, "grad_hy"), argument(call, 1, "grad_cy"))
    given = sum(gradient is not None for gradient in gradients)
    return batched(1, linear(*range(given)), why=_GATES).notation(call)


def _transformer(call: OpCall) -> Notation:
    """`b t! e!, weights => b t! e!`; not split with a mask, because kinds of masks differ in dims.

    The first arguments of `_native_multi_head_attention` are queries, keys and values; the encoder
    layer has one source.
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

    Loss and gradients are computed together; a gradient that is not requested has no elements.
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


RULES = by_operator(
    {
        "_cudnn_rnn _cudnn_rnn_backward": opaque(_BUFFER),
        "_native_multi_head_attention _transformer_encoder_layer_fwd": Rule(_transformer),
        "_thnn_fused_gru_cell _thnn_fused_lstm_cell": batched(1, why=_GATES),
        "_thnn_fused_gru_cell_backward": batched(1, linear(0), why=_GATES),
        "_thnn_fused_lstm_cell_backward_impl": Rule(_lstm_gradient),
        "gru.data lstm.data rnn_relu.data rnn_tanh.data": opaque(
            "sequences of several lengths are packed into one dim"
        ),
        "gru.input lstm.input rnn_relu.input rnn_tanh.input": Rule(_network),
        "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell": Rule(_cell),
        "mkldnn_rnn_layer mkldnn_rnn_layer_backward": opaque(_ONEDNN),
    }
) | by_operator(
    {
        "_linear_cross_entropy_batch_chunked": Rule(_linear_cross_entropy),
        "_linear_cross_entropy_batch_chunked_no_reduction": Rule(_linear_cross_entropy_each),
    },
    "torch_nn",
)
