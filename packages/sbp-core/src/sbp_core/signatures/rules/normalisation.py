"""Softmax and layer normalisation, forward and backward: the normalised dims stay whole."""

from __future__ import annotations

from sbp_core.signatures.arguments import argument, labels, tensor_position, wrap_dim
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dim, Dims, Notation, linear
from sbp_core.signatures.rule import Rule


def _softmax(call: OpCall) -> Notation:
    shape = call.inputs[0].shape
    names = list(labels("d", len(shape)))
    dims = tuple((name,) for name in names)
    backward = len(call.inputs) == 2
    at = wrap_dim(argument(call, 2 if backward else 1, "dim"), len(shape))
    return Notation(
        inputs=(dims,) * len(call.inputs),
        outputs=(dims,),
        dependences=(linear(0),) if backward else (),
        whole=frozenset(names[at : at + 1]),
    )


def _layer_dims(call: OpCall, data: int, shape: int) -> tuple[Dims, Dims, Dims, frozenset[str]]:
    """Return dims of the data, of its statistics and of the weights, and the labels kept whole.

    Args:
        call: The call.
        data: Position of the data among the tensor arguments.
        shape: Position of `normalized_shape` among the arguments.
    """
    num_dims = len(call.inputs[data].shape)
    inner = len(argument(call, shape, "normalized_shape"))
    dims: tuple[Dim, ...] = tuple((name,) for name in labels("d", num_dims))
    outer, normalised = dims[: num_dims - inner], dims[num_dims - inner :]
    ones: tuple[Dim, ...] = ((),) * inner
    return dims, (*outer, *ones), normalised, frozenset(name for (name,) in normalised)


def _layer_norm(call: OpCall) -> Notation:
    data, statistics, weights, whole = _layer_dims(call, 0, 1)
    affine = tuple(range(1, len(call.inputs)))
    has_weight = tensor_position(call, 2, "weight") is not None
    # weight·x̂ + bias is jointly linear in both; with a bias alone it is affine.
    joint = (linear(*affine, outputs=(0,)),) if len(affine) == 2 else ()
    single = (linear(1, outputs=(0,)),) if len(affine) == 1 and has_weight else ()
    return Notation(
        inputs=(data, *(weights for _ in affine)),
        outputs=(data, statistics, statistics),
        dependences=joint or single,
        whole=whole,
    )


def _layer_norm_backward(call: OpCall) -> Notation:
    data, statistics, weights, whole = _layer_dims(call, 1, 2)
    mask = argument(call, 7, "output_mask")
    made = (data, weights, weights)
    return Notation(
        inputs=(data, data, statistics, statistics, *(weights for _ in call.inputs[4:])),
        outputs=tuple(dims for dims, wanted in zip(made, mask, strict=True) if wanted),
        dependences=(linear(0),),
        whole=whole,
    )


RULES = {
    "aten._log_softmax.default": Rule(_softmax),
    "aten._log_softmax_backward_data.default": Rule(_softmax),
    "aten._softmax.default": Rule(_softmax),
    "aten._softmax_backward_data.default": Rule(_softmax),
    "aten.native_layer_norm.default": Rule(_layer_norm),
    "aten.native_layer_norm_backward.default": Rule(_layer_norm_backward),
}
