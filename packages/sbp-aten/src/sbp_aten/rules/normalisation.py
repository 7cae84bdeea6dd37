"""Softmax, and layer, group, RMS and weight normalisation, forward and backward.

    _softmax(dim=1)        d0 t0_1! => d0 t1_1!
    layer norm over d1     d0 d1!, d1!, d1! => d0 d1!, d0 1, d0 1; linear 1 2 to 0
    its backward           d0 d1!, d0 d1!, d0 1, d0 1, d1!, d1! => d0 d1!, d1!, d1!; linear 0
    group norm             n (g c!) s0!, (g c!), (g c!) => n (g c!) s0!, n g, n g

What is normalised stays whole; weight gradients are sums over the rest. Batch norm: `batch_norm`.
"""

from __future__ import annotations

from sbp_core.signatures import (
    Dependence,
    Dim,
    Dims,
    LocalCall,
    Localizer,
    Notation,
    OpCall,
    Rule,
    Shards,
    along,
    argument,
    fresh_dims,
    increasing,
    labels,
    linear,
    tensor_position,
    unread,
    wrap_dim,
)

_SOFTMAX = "each element is divided by a sum over all of it"
_LAYER = "mean and variance are those of all its elements"
_GROUP = "mean and variance of a group are those of all its channels and positions"


def affine(weight: int | None, bias: int | None) -> tuple[Dependence, ...]:
    """Return in what `weight * normalised + bias` is linear or monotone; it is output 0 of several.

    With both it is jointly linear in them, with a bias alone affine.

    Args:
        weight: Position of the weight among the tensor arguments; None if there is none.
        bias: That of the bias.
    """
    both = [at for at in (weight, bias) if at is not None]
    return (
        *(() if weight is None else (linear(*both, outputs=(0,)),)),
        *(() if bias is None else (increasing(bias, outputs=(0,)),)),
    )


def in_weight(weight: int | None, mask: tuple[bool, ...]) -> tuple[Dependence, ...]:
    """Return that of all gradients only the first, that of the data, is linear in the weight.

    Args:
        weight: Position of the weight among the tensor arguments; None if there is none.
        mask: Which gradients are wanted.
    """
    return () if weight is None else (linear(weight, outputs=(0,) if mask[0] else ()),)


def _layer_dims(call: OpCall, data: int, shape: int) -> tuple[Dims, Dims, Dims, frozenset[str]]:
    """Return dims of the data, of its statistics and of the weights, and the labels kept whole.

    Args:
        call: The call.
        data: Position of the data among the tensor arguments.
        shape: Position of `normalized_shape` among the arguments.
    """
    num_dims = len(call.inputs[data].shape)
    inner = len(argument(call, shape, "normalized_shape"))
    dims = fresh_dims(num_dims)
    outer, normalised = dims[: num_dims - inner], dims[num_dims - inner :]
    ones: tuple[Dim, ...] = ((),) * inner
    return dims, (*outer, *ones), normalised, frozenset(name for (name,) in normalised)


def _layer_norm(call: OpCall) -> Notation:
    """Layer norm has two statistics and perhaps a bias, RMS norm one and none."""
    data, statistics, weights, whole = _layer_dims(call, 0, 1)
    weight = tensor_position(call, 2, "weight")
    bias = tensor_position(call, 3, "bias")
    return Notation(
        inputs=(data, *(weights for _ in call.inputs[1:])),
        outputs=(data, *(statistics for _ in call.outputs[1:])),
        dependences=affine(weight, bias),
        whole=whole,
        why=_LAYER,
    )


def _layer_norm_backward(call: OpCall) -> Notation:
    data, statistics, weights, whole = _layer_dims(call, 1, 2)
    mask = tuple(argument(call, 7, "output_mask"))
    bias = tensor_position(call, 6, "bias")
    made = (data, weights, weights)
    return Notation(
        inputs=(data, data, statistics, statistics, *(weights for _ in call.inputs[4:])),
        outputs=tuple(dims for dims, wanted in zip(made, mask, strict=True) if wanted),
        dependences=(
            linear(0),
            *in_weight(tensor_position(call, 5, "weight"), mask),
            *(() if bias is None else (unread(bias),)),
        ),
        whole=whole,
        why=_LAYER,
    )


def _rms_norm_backward(call: OpCall) -> Notation:
    data, statistics, weights, whole = _layer_dims(call, 1, 2)
    mask = tuple(argument(call, 5, "output_mask"))
    return Notation(
        inputs=(data, data, statistics, *(weights for _ in call.inputs[3:])),
        outputs=tuple(dims for dims, wanted in zip((data, weights), mask, strict=True) if wanted),
        dependences=(linear(0), *in_weight(tensor_position(call, 4, "weight"), mask)),
        whole=whole,
        why=_LAYER,
    )


#: Channels of a group-norm: groups of channels.
_CHANNELS: Dim = ("g", "c")


def _grouped(num_dims: int) -> tuple[Dims, frozenset[str]]:
    """Return dims of group-norm data, and the labels kept whole."""
    places = list(labels("s", num_dims - 2))
    return (("n",), _CHANNELS, *((name,) for name in places)), frozenset(["c", *places])


def _group_norm(call: OpCall) -> Notation:
    data, whole = _grouped(len(call.inputs[0].shape))
    statistics: Dims = (("n",), ("g",))
    return Notation(
        inputs=(data, *((_CHANNELS,) for _ in call.inputs[1:])),
        outputs=(data, statistics, statistics),
        dependences=affine(tensor_position(call, 1, "weight"), tensor_position(call, 2, "bias")),
        whole=whole,
        nonempty=frozenset("g"),
        why=_GROUP,
    )


def _group_norm_backward(call: OpCall) -> Notation:
    data, whole = _grouped(len(call.inputs[1].shape))
    statistics: Dims = (("n",), ("g",))
    mask = tuple(argument(call, 9, "output_mask"))
    made = (data, (_CHANNELS,), (_CHANNELS,))
    return Notation(
        inputs=(data, data, statistics, statistics, *((_CHANNELS,) for _ in call.inputs[4:])),
        outputs=tuple(dims for dims, wanted in zip(made, mask, strict=True) if wanted),
        dependences=(linear(0), *in_weight(tensor_position(call, 4, "weight"), mask)),
        whole=whole,
        nonempty=frozenset("g"),
        why=_GROUP,
    )


def _counted(data: int, first: int) -> Localizer:
    """Return the localiser of group norm: it is told N, C, HxW and the number of groups.

    Args:
        data: Position of the data among the tensor arguments.
        first: Position of N among the arguments.
    """

    def localize(call: OpCall, shards: Shards) -> LocalCall:
        (first_n, last_n), (first_c, last_c) = shards.inputs[data][:2]
        _, channels, area, groups = call.args[first : first + 4]
        local = last_c - first_c
        per_group = int(str(channels)) // int(str(groups))
        counts = (last_n - first_n, local, area, local // per_group)
        args = (*call.args[:first], *counts, *call.args[first + 4 :])
        return LocalCall(op=call.op, args=args, kwargs=call.kwargs)

    return localize


def _weight_norm(call: OpCall) -> Notation:
    """`d0+ d1!, d0+ 1 => d0+ d1!, d0+ 1; linear 1 to 0` for `dim=0`."""
    return _scaled(call, argument(call, 2, "dim", 0), (linear(1, outputs=(0,)),))


def _weight_norm_backward(call: OpCall) -> Notation:
    """`d0+ d1!, d0+ d1!, d0+ 1, d0+ 1 => d0+ d1!, d0+ 1; linear 0; linear 2 to 0`."""
    return _scaled(call, argument(call, 4, "dim"), (linear(0), linear(2, outputs=(0,))))


def _scaled(call: OpCall, dim: int, dependences: tuple[Dependence, ...]) -> Notation:
    """Return the notation of an operator on slices along `dim` and one number for each."""
    shape = call.inputs[0].shape
    dims = fresh_dims(len(shape))
    at = wrap_dim(dim, len(shape))
    numbers = tuple(names if index == at else () for index, names in enumerate(dims))

    def dims_of(shape: tuple[int, ...]) -> Dims:
        return dims if shape == call.inputs[0].shape else numbers

    return Notation(
        inputs=tuple(dims_of(entry.shape) for entry in call.inputs),
        outputs=(dims, numbers),
        dependences=dependences,
        whole=frozenset(name for index, (name,) in enumerate(dims) if index != at),
        nonempty=frozenset(dims[at]),
        why="the norm of a slice is one of all its elements",
    )


def _softmax_backward(call: OpCall) -> Notation:
    """`_softmax_backward_data(gradient, output, dim, input dtype)`: all are of one shape."""
    dims = fresh_dims(len(call.outputs[0].shape))
    at = wrap_dim(argument(call, 2, "dim"), len(dims))
    return Notation(
        inputs=(dims, dims),
        outputs=(dims,),
        dependences=(linear(0),),
        whole=frozenset(name for dim in dims[at : at + 1] for name in dim),
        why=_SOFTMAX,
    )


RULES = {
    "aten._fused_rms_norm.default": Rule(_layer_norm),
    "aten._fused_rms_norm_backward.default": Rule(_rms_norm_backward),
    "aten._log_softmax.default": along(1, why=_SOFTMAX),
    "aten._log_softmax_backward_data.default": Rule(_softmax_backward),
    "aten._safe_softmax.default": along(1, why=_SOFTMAX),
    "aten._softmax.default": along(1, why=_SOFTMAX),
    "aten._softmax_backward_data.default": Rule(_softmax_backward),
    "aten._weight_norm_interface.default": Rule(_weight_norm),
    "aten._weight_norm_interface_backward.default": Rule(_weight_norm_backward),
    "aten.native_group_norm.default": Rule(_group_norm, _counted(0, 3)),
    "aten.native_group_norm_backward.default": Rule(_group_norm_backward, _counted(1, 5)),
    "aten.native_layer_norm.default": Rule(_layer_norm),
    "aten.native_layer_norm_backward.default": Rule(_layer_norm_backward),
}
