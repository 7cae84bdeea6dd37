"""Connectionist temporal classification, forward and backward: the batch is free.

    forward     t! n+ c!, n+ s! => n+, n+ t! a!
    backward    n, t! n c!, n s!, n, n t! a! => t! n c!; linear 0

Lengths are literals, or tensors `n`. Targets may also stand in one row, `s!`, where lengths say
which are whose. Output 1 of the forward operator is as wide as the longest target of the batch
needs (if lengths are tensors: as it may need); a rank widens its own. PyTorch leaves those of its
elements undefined that no target reaches.
"""

from __future__ import annotations

from sbp_core.graph import Argument
from sbp_core.signatures import (
    Dims,
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    linear,
    run_as_is,
)

_SCORES: Dims = (("t",), ("n",), ("c",))
_SAMPLES: Dims = (("n",),)
_ALPHA: Dims = (("n",), ("t",), ("a",))
_WHY = "a sample is aligned over all times, classes and labels"


def _targets(call: OpCall, position: int) -> Dims:
    """Return the dims of the targets."""
    in_row = len(call.inputs[position].shape) == 1
    return (("s",),) if in_row else (("n",), ("s",))


def _whole(call: OpCall, targets: Dims) -> frozenset[str]:
    """Return the labels kept whole: also the batch, if only values say which targets are whose."""
    unknown = call.op.endswith(".Tensor") and len(targets) == 1
    return frozenset("tcsan" if unknown else "tcsa")


def _forward(call: OpCall) -> Notation:
    targets = _targets(call, 1)
    lengths = [_SAMPLES] * (len(call.inputs) - 2)
    return Notation(
        inputs=(_SCORES, targets, *lengths),
        outputs=(_SAMPLES, _ALPHA),
        whole=_whole(call, targets),
        nonempty=frozenset("n"),
        why=_WHY,
    )


def _backward(call: OpCall) -> Notation:
    targets = _targets(call, 2)
    lengths = [_SAMPLES] * (len(call.inputs) - 5)
    return Notation(
        inputs=(_SAMPLES, _SCORES, targets, *lengths, _SAMPLES, _ALPHA),
        outputs=(_SCORES,),
        dependences=(linear(0),),
        whole=_whole(call, targets),
        why=_WHY,
    )


def _local_args(
    builder: LocalProgramBuilder, call: OpCall, position: int, samples: tuple[int, int]
) -> tuple[Argument, ...]:
    """Return the arguments of a rank: literal lengths of its samples, and their part of a row.

    Args:
        builder: Collects the cut of the row.
        call: The call.
        position: Where the targets stand; lengths of scores and of targets follow.
        samples: Bounds of the samples that the rank holds.
    """
    start, stop = samples
    args = list(call.args)
    if call.op.endswith(".Tensor"):
        return tuple(args)
    lengths = tuple(int(str(length)) for length in _listed(args[position + 2]))
    for at in (position + 1, position + 2):
        args[at] = _listed(args[at])[start:stop]
    if len(call.inputs[position].shape) == 1:
        before, behind = sum(lengths[:start]), sum(lengths[:stop])
        args[position] = builder("aten.slice.Tensor", args[position], 0, before, behind)
    return tuple(args)


def _listed(argument: Argument) -> tuple[Argument, ...]:
    return argument if isinstance(argument, tuple) else ()


def _localize_forward(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    whole = shards.inputs[0][1] == (0, call.inputs[0].shape[1])
    if whole and not call.op.endswith(".Tensor"):
        return run_as_is(call)
    builder = LocalProgramBuilder()
    args = _local_args(builder, call, 1, shards.inputs[0][1])
    loss, alpha = builder.several(2, call.op, *args, **call.kwargs)
    shape = shards.output_shape(1)
    padding = builder("aten.new_full.default", alpha, shape, float("-inf"))
    wide = builder("aten.cat.default", (alpha, padding), 2)
    return builder.program(loss, builder("aten.slice.Tensor", wide, 2, 0, shape[2]))


def _localize_backward(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    if shards.outputs[0][1] == (0, call.outputs[0].shape[1]):
        return run_as_is(call)
    builder = LocalProgramBuilder()
    args = _local_args(builder, call, 2, shards.outputs[0][1])
    return builder.program(builder(call.op, *args, **call.kwargs))


RULES = {
    "aten._ctc_loss.Tensor": Rule(_forward, _localize_forward),
    "aten._ctc_loss.default": Rule(_forward, _localize_forward),
    "aten._ctc_loss_backward.Tensor": Rule(_backward, _localize_backward),
    "aten._ctc_loss_backward.default": Rule(_backward, _localize_backward),
}
