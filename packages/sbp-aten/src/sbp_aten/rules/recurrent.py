"""Recurrent networks: batches are free; time is a chain, and gates are chunks of one dim.

Tensors of data carry the batch, weights do not, and gradients of biases are sums over it.
"""

from __future__ import annotations

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
_BUFFER = "what the backward needs is kept in a buffer without a documented layout"
_ONEDNN = f"{_BUFFER}; captured with torch.backends.mkldnn disabled, the layer is products"


def _network(call: OpCall) -> Notation:
    """`lstm.input` and alike: `t! b+ i!, l! b+ h!, weights => t! b+ o!, l! b+ h!`.

    oneDNN, which serves the LSTM on CPUs, refuses an empty batch.
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


RULES = {
    **dict.fromkeys(
        ("aten.gru.input", "aten.lstm.input", "aten.rnn_relu.input", "aten.rnn_tanh.input"),
        Rule(_network),
    ),
    **dict.fromkeys(
        ("aten.gru.data", "aten.lstm.data", "aten.rnn_relu.data", "aten.rnn_tanh.data"),
        opaque("sequences of several lengths are packed into one dim"),
    ),
    **dict.fromkeys(
        (
            "aten.gru_cell.default",
            "aten.lstm_cell.default",
            "aten.rnn_relu_cell.default",
            "aten.rnn_tanh_cell.default",
        ),
        Rule(_cell),
    ),
    **dict.fromkeys(
        ("aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"), opaque(_BUFFER)
    ),
    **dict.fromkeys(
        ("aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"),
        opaque(_ONEDNN),
    ),
    "aten._thnn_fused_gru_cell.default": batched(1, why=_GATES),
    "aten._thnn_fused_gru_cell_backward.default": batched(1, linear(0), why=_GATES),
    "aten._thnn_fused_lstm_cell.default": batched(1, why=_GATES),
    "aten._thnn_fused_lstm_cell_backward_impl.default": Rule(_lstm_gradient),
}
