"""Sharding rules of softmax, and of batch, layer, group, RMS and weight normalisation.

Forward and backward, in notation:

    _softmax(dim=1)        d0 t0_1! => d0 t1_1!
    layer norm             d* n*!, n*, n* => d* n*, d* 1, d* 1; linear 1 2 to 0
    its backward           d* n*!, d* n*, d* 1, d* 1, n*, n* => d* n*, n*, n*; linear 0
    group norm             n (g c!) s*!, (g c), (g c) => n (g c) s*, n g, n g

Dims that are normalised stay whole; weight gradients are sums over the other dims.

    batch norm, training   n! c+ s*!, c, c, c, c => n c s*, c, c; linear 1 2 to 0
    evaluation             n c+ s*, c, c, c, c => n c s*, t6_0!, t7_0!; linear 1 2 to 0;
                           linear 0 2 3 to 0

In training the statistics run over the batch and all positions, so only channels may be split. In
evaluation batch and positions may be split, and weight gradients are sums over them.

`native_batch_norm` and similar operators overwrite the running statistics in place; here they are
arguments only. The in-place result of a rank is right, because they are split like the channels.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sbp_aten.rules.formula import by_operator, notation
from sbp_core.signatures import (
    LocalCall,
    Localizer,
    Notation,
    OpCall,
    Rule,
    Shards,
    along,
    argument,
    tensor_position,
    wrap_dim,
)

_SOFTMAX = "each element is divided by a sum over all of it"
_LAYER = "why mean and variance are taken over all its elements"
_GROUP = "why mean and variance of a group are taken over all its channels and positions"
_BATCH = "why the statistics are taken over the whole batch and all positions"


def _affine(call: OpCall, weight: int, bias: int) -> str:
    """Return clauses for `weight * normalised + bias`, output 0 of several: linear or monotone.

    With both it is jointly linear in them, with a bias alone affine.

    Args:
        call: The call.
        weight: Position of the argument `weight`, which is optional.
        bias: Position of the argument `bias`.
    """
    scale, shift = tensor_position(call, weight, "weight"), tensor_position(call, bias, "bias")
    both = " ".join(str(at) for at in (scale, shift) if at is not None)
    linear = "" if scale is None else f"; linear {both} to 0"
    return linear if shift is None else f"{linear}; increasing {shift} to 0"


def _gradients(call: OpCall, weight: int, mask: int, made: Sequence[str]) -> tuple[str, str]:
    """Return the outputs of a backward operator, and clauses for their linear arguments.

    Only the first gradient, of the data, is linear in the weight.

    Args:
        call: The call.
        weight: Position of the argument `weight`.
        mask: Position of the mask of requested gradients.
        made: Dims of each gradient.
    """
    wanted = argument(call, mask, "output_mask")
    at = tensor_position(call, weight, "weight")
    linear = "" if at is None else f"; linear {at} to {'0' * wanted[0]}"
    outputs = (dims for dims, asked in zip(made, wanted, strict=False) if asked)
    return ", ".join(outputs), f"linear 0{linear}"


def _layer_norm(call: OpCall) -> Notation:
    """Layer norm has two statistics and an optional bias; RMS norm has one and no bias."""
    inner = len(argument(call, 1, "normalized_shape"))
    inputs = ", n*" * (len(call.inputs) - 1)
    outputs = f", d*{' 1' * inner}" * (len(call.outputs) - 1)
    text = f"d* n*!{inputs} => d* n*{outputs}{_affine(call, 2, 3)}; {_LAYER}"
    return notation(call, text, n=inner)


def _layer_norm_backward(call: OpCall) -> Notation:
    """RMS norm has one statistic and no bias."""
    rms = "rms" in call.op
    inner = len(argument(call, 2, "normalized_shape"))
    statistics = f", d*{' 1' * inner}" * (1 if rms else 2)
    weight, mask = (4, 5) if rms else (5, 7)
    weights = ", n*" * (len(call.inputs) - (3 if rms else 4))
    bias = None if rms else tensor_position(call, 6, "bias")
    made, linear = _gradients(call, weight, mask, ("d* n*", "n*", "n*"))
    linear += "" if bias is None else f"; unread {bias}"
    text = f"d* n*!, d* n*{statistics}{weights} => {made}; {linear}; {_LAYER}"
    return notation(call, text, n=inner)


def _group_norm(call: OpCall) -> Notation:
    channels = ", (g c)" * (len(call.inputs) - 1)
    outputs = f"n (g c) s*, n g, n g{_affine(call, 1, 2)}; {_GROUP}"
    return notation(call, f"n (g+ c!) s*!{channels} => {outputs}")


def _group_norm_backward(call: OpCall) -> Notation:
    made, linear = _gradients(call, 4, 9, ("n (g c) s*", "(g c)", "(g c)"))
    inputs = f"n (g+ c!) s*!, n (g c) s*, n g, n g{', (g c)' * (len(call.inputs) - 4)}"
    return notation(call, f"{inputs} => {made}; {linear}; {_GROUP}")


def _counted(data: int, first: int) -> Localizer:
    """Return the localiser of group norm, which has arguments N, C, HxW and number of groups.

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
    """`d0+ d1!, d0+ 1 => d0+ d1!, d0+ 1; linear 1 to 0` for `dim=0`: a number for each slice.

    Backward: `d0+ d1!, d0+ d1!, d0+ 1, d0+ 1 => d0+ d1!, d0+ 1; linear 0; linear 2 to 0`.
    """
    backward = "backward" in call.op
    shape = call.inputs[0].shape
    at = wrap_dim(argument(call, 4, "dim") if backward else argument(call, 2, "dim", 0), len(shape))
    data = " ".join(f"d{dim}" + ("+" if dim == at else "!") for dim in range(len(shape)))
    numbers = " ".join(f"d{dim}" if dim == at else "1" for dim in range(len(shape)))
    inputs = ", ".join(data if entry.shape == shape else numbers for entry in call.inputs)
    linear = "linear 0; linear 2 to 0" if backward else "linear 1 to 0"
    why = "why the norm of a slice is taken over all its elements"
    return notation(call, f"{inputs} => {data}, {numbers}; {linear}; {why}")


def _softmax_backward(call: OpCall) -> Notation:
    """`_softmax_backward_data(gradient, output, dim, input dtype)`: all tensors have one shape."""
    rank = len(call.outputs[0].shape)
    at = wrap_dim(argument(call, 2, "dim"), rank)
    dims = " ".join(f"d{dim}" + "!" * (dim == at) for dim in range(rank))
    return notation(call, f"{dims}, {dims or '()'} => {dims}; linear 0; why {_SOFTMAX}")


# Batch normalisation


def _of_channels(
    call: OpCall, data: int, like: Sequence[bool], fixed: bool, clauses: Iterable[str]
) -> Notation:
    """Return the notation: data is `n c s*`, other tensors have a number for each channel.

    Tensors of other extents are empty in this mode.

    Args:
        call: The call.
        data: Position of the data among the tensor arguments.
        like: For each output, whether it has the dims of the data.
        fixed: Whether statistics are given: then batch and positions may be split.
        clauses: Clauses about linear arguments.
    """
    shape = call.inputs[data].shape
    mark = "" if fixed else "!"
    # Kernels divide by the number of elements of a channel.
    whole = f"n{mark}{'+' * data} c+ s*{mark}"
    types = enumerate((*call.inputs, *call.outputs))
    channels = ["c" if entry.shape == shape[1:2] else f"t{at}_0!" for at, entry in types]
    count = len(call.inputs)
    inputs = [whole if at <= data else dims for at, dims in enumerate(channels[:count])]
    outputs = [whole if alike else dims for alike, dims in zip(like, channels[count:], strict=True)]
    none = [
        f"reduce {name}@{at} none"
        for at, dims in enumerate(outputs)
        for name in ("n", "c", "s*")
        if data == 0 and dims not in (whole, name)
    ]
    formula = f"{', '.join(inputs)} => {', '.join(outputs)}"
    return notation(call, "; ".join([formula, *clauses, *none, _BATCH]))


def _batch_norm(trains: bool | None) -> Rule:
    """Return the rule of a forward operator; None: its sixth argument is `training`."""

    def meaning(call: OpCall) -> Notation:
        training = bool(argument(call, 5, "training")) if trains is None else trains
        clauses = list(filter(None, _affine(call, 1, 2).split("; ")))
        if not training and not any(
            entry.shape == call.inputs[0].shape[1:2] for entry in call.outputs[1:]
        ):
            bias = tensor_position(call, 2, "bias")
            mean = tensor_position(call, 3, "running_mean")
            shifts = [str(at) for at in (0, bias, mean) if at is not None]
            clauses.append(f"linear {' '.join(shifts)} to 0")
        momentum = 6 - ("_with_update" in call.op)
        if training and len(call.outputs) >= 5 and argument(call, momentum, "momentum") <= 1:
            # The new running statistics (the last two outputs) increase with the old ones.
            first, mean, variance = (
                len(call.outputs) - 2,
                len(call.inputs) - 2,
                len(call.inputs) - 1,
            )
            clauses += [
                f"increasing {mean} to {first}",
                f"increasing {variance} to {first + 1}",
                f"increasing {mean} {variance} to {first} {first + 1}",
            ]
        like = [True, *(False for _ in call.outputs[1:])]
        return _of_channels(call, 0, like, not training, clauses)

    return Rule(meaning)


def _batch_norm_backward(call: OpCall) -> Notation:
    """Arguments: gradient, data, weight, running and saved statistics; the eighth is `train`."""
    spread, trains = ("save_invstd", "train") if "native" in call.op else ("save_var", "update")
    training = bool(argument(call, 7, trains))
    mask = tuple(argument(call, 9, "output_mask"))
    running = [tensor_position(call, 3, "running_mean"), tensor_position(call, 4, "running_var")]
    saved = [tensor_position(call, 5, "save_mean"), tensor_position(call, 6, spread)]
    mean = (saved if training else running)[0]
    fixed = not (training and mask[0])
    clauses = _gradients(call, 2, 9, ())[1].split("; ")
    clauses += [f"ignored {at}" for at in (running if training else saved) if at is not None]
    if fixed and mean is not None:
        # The gradient of the weight sums gradient * (data - mean) * scale.
        clauses.append(f"linear 1 {mean} to {int(mask[0]) if mask[1] else ''}")
    like = [index == 0 for index, wanted in enumerate(mask) if wanted]
    return _of_channels(call, 1, like, fixed, clauses)


RULES = by_operator(
    {
        "_batch_norm_no_update": _batch_norm(trains=False),
        "_batch_norm_with_update_functional": _batch_norm(trains=True),
        "_fused_rms_norm native_layer_norm": Rule(_layer_norm),
        "_fused_rms_norm_backward native_layer_norm_backward": Rule(_layer_norm_backward),
        "_log_softmax _safe_softmax _softmax": along(1, why=_SOFTMAX),
        "_log_softmax_backward_data _softmax_backward_data": Rule(_softmax_backward),
        "_native_batch_norm_legit _native_batch_norm_legit_functional": _batch_norm(trains=None),
        "_native_batch_norm_legit.no_stats": _batch_norm(trains=True),
        "_native_batch_norm_legit_no_training": _batch_norm(trains=False),
        "_weight_norm_interface _weight_norm_interface_backward": Rule(_weight_norm),
        "batch_norm_backward native_batch_norm_backward": Rule(_batch_norm_backward),
        "native_batch_norm": _batch_norm(trains=None),
        "native_group_norm": Rule(_group_norm, _counted(0, 3)),
        "native_group_norm_backward": Rule(_group_norm_backward, _counted(1, 5)),
    }
)
