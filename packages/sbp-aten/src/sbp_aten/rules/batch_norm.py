"""Batch normalisation, forward and backward.

    training      n! c+ s0!, c+, c+, c+, c+ => n! c+ s0!, c+, c+; linear 1 2 to 0
    evaluation    n c+ s0, c+, c+, c+, c+ => n c+ s0, t6_0!, t7_0!; linear 1 2 to 0;
                  linear 0 2 3 to 0

In training the statistics run over the batch and all positions, so only channels may be split. In
evaluation batch and positions are free, and weight gradients are sums over them.

`native_batch_norm` and others write the running statistics that they are given; here those are
arguments only. What a rank writes is right, since its shards of them lie like the channels.
"""

from __future__ import annotations

from collections.abc import Iterator

from sbp_aten.rules.normalisation import affine, in_weight
from sbp_core.signatures import (
    Dependence,
    Dims,
    Notation,
    OpCall,
    Rule,
    argument,
    fresh_dims,
    ignored,
    increasing,
    labels,
    linear,
    tensor_position,
)

_WHY = "the statistics are those of the whole batch and of all positions"


def _notation(
    call: OpCall, data: int, outputs: tuple[bool, ...], fixed: bool, *dependences: Dependence
) -> Notation:
    """Return the notation: data is `n c s0 ...`, all else has a number for each channel.

    Tensors of other extents are those that a mode leaves empty.

    Args:
        call: The call.
        data: Position of the data among the tensor arguments.
        outputs: For each output, whether it is like the data.
        fixed: Whether statistics are given: then batch and positions are free.
        *dependences: In what the operator is linear.
    """
    shape = call.inputs[data].shape
    names = ("n", "c", *labels("s", len(shape) - 2))
    moved = frozenset(names) - {"c"}
    inputs = tuple(index <= data for index in range(len(call.inputs)))
    tensors: list[Dims] = []
    for index, (entry, like) in enumerate(
        zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)
    ):
        if like:
            tensors.append(tuple((name,) for name in names))
        else:
            tensors.append((("c",),) if entry.shape == shape[1:2] else fresh_dims(1, f"t{index}_"))
    own = {name for dims in tensors for dim in dims for name in dim} - set(names)
    forward = data == 0
    kept = tensors[len(call.inputs) :]
    return Notation(
        inputs=tuple(tensors[: len(call.inputs)]),
        outputs=tuple(kept),
        dependences=dependences,
        whole=frozenset(own if fixed else own | moved),
        # Kernels divide by the number of elements of a channel.
        nonempty=frozenset("c" if forward else "cn"),
        reductions=tuple(
            (f"{name}@{index}", "none")
            for index, dims in enumerate(kept)
            for name in names
            if forward and (name,) not in dims
        ),
        why=_WHY,
    )


def _forward(trains: bool | None) -> Rule:
    """Return the rule of a forward operator; None: its sixth argument says if this is training."""

    def meaning(call: OpCall) -> Notation:
        training = bool(argument(call, 5, "training")) if trains is None else trains
        weight, bias = tensor_position(call, 1, "weight"), tensor_position(call, 2, "bias")
        dependences = affine(weight, bias)
        sized = any(entry.shape == call.inputs[0].shape[1:2] for entry in call.outputs[1:])
        if not training and not sized:
            mean = tensor_position(call, 3, "running_mean")
            shifts = [at for at in (0, bias, mean) if at is not None]
            dependences = (*dependences, linear(*shifts, outputs=(0,)))
        if training and len(call.outputs) >= 5:
            dependences = (*dependences, *_updates(call))
        like = (True, *(False for _ in call.outputs[1:]))
        return _notation(call, 0, like, not training, *dependences)

    return Rule(meaning)


def _updates(call: OpCall) -> Iterator[Dependence]:
    """Yield in what the new running statistics, the last two outputs, grow with the old ones."""
    if argument(call, 6 - ("_with_update" in call.op), "momentum") <= 1:
        first = len(call.outputs) - 2
        mean, variance = len(call.inputs) - 2, len(call.inputs) - 1
        yield increasing(mean, outputs=(first,))
        yield increasing(variance, outputs=(first + 1,))
        yield increasing(mean, variance, outputs=(first, first + 1))


def _backward(call: OpCall) -> Notation:
    """Arguments: gradient, data, weight, running and saved statistics; the eighth says the mode."""
    spread, trains = ("save_invstd", "train") if "native" in call.op else ("save_var", "update")
    training = bool(argument(call, 7, trains))
    mask = tuple(argument(call, 9, "output_mask"))
    weight = tensor_position(call, 2, "weight")
    running = [tensor_position(call, 3, "running_mean"), tensor_position(call, 4, "running_var")]
    saved = [tensor_position(call, 5, "save_mean"), tensor_position(call, 6, spread)]
    mean = (saved if training else running)[0]
    unused = [at for at in (running if training else saved) if at is not None]
    fixed = not (training and mask[0])
    dependences = [linear(0), *in_weight(weight, mask), *map(ignored, unused)]
    if fixed and mean is not None:
        # The gradient of the weight sums gradient * (data - mean) * scale.
        dependences.append(linear(1, mean, outputs=(int(mask[0]),) if mask[1] else ()))
    like = tuple(index == 0 for index, wanted in enumerate(mask) if wanted)
    return _notation(call, 1, like, fixed, *dependences)


RULES = {
    "aten._batch_norm_no_update.default": _forward(trains=False),
    "aten._batch_norm_with_update_functional.default": _forward(trains=True),
    "aten._native_batch_norm_legit.default": _forward(trains=None),
    "aten._native_batch_norm_legit.no_stats": _forward(trains=True),
    "aten._native_batch_norm_legit_functional.default": _forward(trains=None),
    "aten._native_batch_norm_legit_no_training.default": _forward(trains=False),
    "aten.batch_norm_backward.default": Rule(_backward),
    "aten.native_batch_norm.default": _forward(trains=None),
    "aten.native_batch_norm_backward.default": Rule(_backward),
}
