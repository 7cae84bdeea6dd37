"""Sharding rules of losses, forward and backward: pairs of tensors, margins, classes, alignments.

    mse_loss, reduction none     ..., ... => ...
    mse_loss, sum or mean        ..., ... => ()
    its backward                 (), ..., ... => ...; linear 0; linear 1 2
    multi_margin_loss, sum       n+ c!, n+, c! => (); linear 2

A mean runs over all elements (samples). So a shard computes a part of it, and its gradient divides
by the number of all elements; see `reductions`.

Negative log-likelihood: samples and classes may be split.

    sum     n c s*, n s*, w! => (), (); linear 0 to 0; linear 2; reduce c@1 none
    mean    n! c s*!, n! s*!, w! => (), (); linear 0 to 0; reduce c@1 none
    back    (), n c s*, n s*, w!, () => n c s*; linear 0; linear 3; unread 1

A rank with some of the classes ignores targets of other classes: its losses are partial sums. It
has all targets and class weights, hence the total weight, which is output 1. A mean divides by the
total weight, which a rank with some of the samples does not know, so forward samples stay whole;
the backward operators get it as an argument.

Connectionist temporal classification: the batch may be split.

    forward     t! n+ c!, n+ s! => n+, n+ t! a!
    backward    n, t! n c!, n s!, n, n t! a! => t! n c!; linear 0

Lengths are literals, or tensors `n`. Targets may also be concatenated in one row, `s!`, and are
separated by the lengths. Output 1 of the forward operator is as wide as the longest target of the
batch needs (if lengths are tensors: as it may need); a rank widens its own. PyTorch leaves its
elements undefined that no target reaches.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from math import prod

from sbp_aten.rules.formula import by_operator, notation
from sbp_aten.rules.reductions import part_of_gradient, part_of_mean
from sbp_aten.rules.windows import is_cut, shape_of
from sbp_core.graph import Argument, Ref, Symbol
from sbp_core.signatures import (
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Range,
    Rule,
    Shards,
    argument,
    broadcast_shape,
    run_as_is,
    tensor_position,
    with_literals,
)

#: PyTorch's numbers for `reduction=`.
NONE, MEAN, SUM = 0, 1, 2


def _is_gradient(call: OpCall) -> int:
    """Return 1 for the gradient of a loss (argument 0 is the gradient of its result); else 0."""
    return int("_backward." in call.op)


def _linear_in(call: OpCall, weight: int | None, more: str = "") -> str:
    """Return the clauses about linear arguments of a loss, given the position of its weight."""
    at = None if weight is None else tensor_position(call, weight, "weight")
    linear = "; linear 0" * _is_gradient(call) + more
    return linear if at is None else f"{linear}; linear {at}"


def _part(call: OpCall, reduction: int, local: int, total: int) -> LocalCall | LocalProgram:
    """Return the program of a rank that holds `local` of `total` samples."""
    if argument(call, reduction, "reduction", MEAN) != MEAN:
        return run_as_is(call)
    if _is_gradient(call):
        return part_of_gradient(call, local, total)
    summed = with_literals(call, (reduction, "reduction", SUM))
    return part_of_mean(call, local, total, summed)


def _elementwise(reduction: int, weight: int | None = None, more: str = "") -> Rule:
    """Return the rule of a loss of each element; elements are broadcast and then reduced.

    Args:
        reduction: Position of the argument `reduction`.
        weight: Position of the argument `weight`; None if it has none.
        more: Clauses about further linear arguments.
    """

    def meaning(call: OpCall) -> Notation:
        work = prod(broadcast_shape([entry.shape for entry in call.inputs[_is_gradient(call) :]]))
        inputs = ", ".join("..." for _ in call.inputs)
        return notation(call, f"{inputs} => ...{_linear_in(call, weight, more)}; flop {work}")

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        shapes = [entry.shape for entry in call.inputs]
        held = [shape_of(bounds) for bounds in shards.inputs]
        if _is_gradient(call):
            # These divide by the number of elements of the first tensor, before it is broadcast.
            return _part(call, reduction, prod(held[1]), prod(shapes[1]))
        return _part(call, reduction, prod(broadcast_shape(held)), prod(broadcast_shape(shapes)))

    return Rule(meaning, localize)


def _margin(layout: str, reduction: int, weight: int | None = None) -> Rule:
    """Return the rule of a loss that compares the classes of each sample.

    Args:
        layout: Role of each tensor: `x` scores, `y` targets, `w` optional weights of classes, and
            `l` losses.
        reduction: Position of the argument `reduction`.
        weight: Position of the argument `weight`; None if it has none.
    """

    def meaning(call: OpCall) -> Notation:
        shape = call.inputs[_is_gradient(call)].shape
        each = argument(call, reduction, "reduction", MEAN) == NONE
        # Without samples, the kernels do not return zero.
        samples = "n" + "+" * (not _is_gradient(call) and not each) if len(shape) == 2 else ""
        weighted = weight is not None and tensor_position(call, weight, "weight") is not None
        texts = {
            "x": f"{samples} c!" if shape else "()",
            "y": samples or "t*!",
            "w": "c!" if weighted else "",
            "l": samples if each else "()",
        }
        sides = [[texts[kind] for kind in side.split()] for side in layout.split(">")]
        left, right = (", ".join(filter(None, side)) for side in sides)
        why = "why the score of the target is compared with those of all classes"
        return notation(call, f"{left} => {right or '()'}{_linear_in(call, weight)}; {why}")

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        at = _is_gradient(call)
        bounds, shape = shards.inputs[at], call.inputs[at].shape
        held, total = (shape_of(bounds)[0], shape[0]) if len(shape) == 2 else (1, 1)
        return _part(call, reduction, held, total)

    return Rule(meaning, localize)


# Negative log-likelihood

#: The target that a rank ignores, whatever the call ignores.
_ELSEWHERE = -100

_ARGUMENTS = ("self", "target", "weight", "reduction", "ignore_index")


def _is_batched(call: OpCall) -> bool:
    return len(call.inputs[_is_gradient(call)].shape) > 1


def _nll(call: OpCall) -> Notation:
    backward, batched = _is_gradient(call), _is_batched(call)
    reduction = argument(call, 3 + backward, "reduction")
    each, mean = batched and reduction == NONE, reduction == MEAN
    weight = ", w!" * (tensor_position(call, 2 + backward, "weight") is not None)
    # A mean of the forward operator needs all samples.
    mark = "!" * (mean and not backward)
    scores, targets = (f"n{mark} c s*{mark}", f"n{mark} s*{mark}") if batched else ("c", "t*!")
    losses = targets if each else "()"
    if backward:
        clauses = [
            "linear 0",
            "linear 3" * bool(weight),
            "decreasing 0" * (not mean and not weight),
            "unread 1",
            f"unread {len(call.inputs) - 1}" * (not mean),
            "why any target may need any class weight",
        ]
        formula = f"{losses}, {scores}, {targets}{weight}, () => {scores}"
    else:
        why = "a mean divides by the weight of all samples"
        clauses = [
            "linear 0 to 0",
            ("linear 2 to 0" if each else "linear 2") * (bool(weight) and not mean),
            "decreasing 0 to 0" * (each and not weight),
            "reduce c@1 none",
            # The total weight of losses that are not reduced is zero.
            "reduce n@1 none; reduce s*@1 none" * each,
            f"why {why if batched and mean else 'any target may need any class weight'}",
        ]
        formula = f"{scores}, {targets}{weight} => {losses}, ()"
    parts = [part for clause in clauses for part in clause.split("; ") if part]
    return notation(call, "; ".join([formula, *parts]))


def _localize_nll(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Sum over the rank's classes; a mean divides by the weight of all targets."""
    dim = int(_is_batched(call))
    bounds = shards.inputs[0][dim]
    if not is_cut(bounds, call.inputs[0].shape[dim]):
        return run_as_is(call)
    builder = LocalProgramBuilder()
    scores, target, weight, reduction, ignored = (
        argument(call, index, name) for index, name in enumerate(_ARGUMENTS)
    )
    here, weight_here = _here(builder, call, target, weight, ignored, bounds)
    kind = SUM if reduction == MEAN else reduction
    loss, total = builder.several(2, call.op, scores, here, weight_here, kind, _ELSEWHERE)
    if reduction == NONE and _is_batched(call):
        return builder.program(loss, total)
    # The total weight of all targets, of any class.
    wide = _widened(builder, call, target)
    wanted = builder("aten.ne.Scalar", wide, ignored)
    if weight is None:
        dtype = Symbol("dtype", call.outputs[1].dtype)
        total = builder("aten.sum.default", wanted, dtype=dtype)
    else:
        safe = builder("aten.where.ScalarOther", wanted, wide, 0)
        weights = builder("aten.take.default", weight, safe)
        total = builder("aten.sum.default", builder("aten.where.ScalarOther", wanted, weights, 0.0))
    if reduction == MEAN:
        loss = builder("aten.div.Tensor", loss, total)
    return builder.program(loss, total)


def _localize_nll_backward(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    dim = int(_is_batched(call))
    bounds = shards.inputs[1][dim]
    if not is_cut(bounds, call.inputs[1].shape[dim]):
        return run_as_is(call)
    builder = LocalProgramBuilder()
    gradient, scores, target, weight, reduction, ignored, total = (
        argument(call, index, name)
        for index, name in enumerate(("grad_output", *_ARGUMENTS, "total_weight"))
    )
    here, weight_here = _here(builder, call, target, weight, ignored, bounds)
    args = (gradient, scores, here, weight_here, reduction, _ELSEWHERE, total)
    return builder.program(builder(call.op, *args))


def _here(
    builder: LocalProgramBuilder,
    call: OpCall,
    target: Argument,
    weight: Argument,
    ignored: int,
    bounds: Range,
) -> tuple[Ref, Argument]:
    """Return targets counted from the first class of the rank, and the weights of its classes."""
    start, stop = bounds
    wide = _widened(builder, call, target)
    inside = builder(
        "aten.logical_and.default",
        builder("aten.ge.Scalar", wide, start),
        builder("aten.lt.Scalar", wide, stop),
    )
    if start <= ignored < stop:
        wanted = builder("aten.ne.Scalar", wide, ignored)
        inside = builder("aten.logical_and.default", inside, wanted)
    shifted = builder("aten.sub.Scalar", wide, start)
    here = builder("aten.where.ScalarOther", inside, shifted, _ELSEWHERE)
    own = weight if weight is None else builder("aten.slice.Tensor", weight, 0, start, stop)
    return here, own


def _widened(builder: LocalProgramBuilder, call: OpCall, target: Argument) -> Argument:
    """Return targets as int64, because uint8 cannot represent `_ELSEWHERE`."""
    if call.inputs[1 + _is_gradient(call)].dtype == "int64":
        return target
    return builder("aten._to_copy.default", target, dtype=Symbol("dtype", "int64"))


# Connectionist temporal classification


def _ctc(call: OpCall) -> Notation:
    backward = _is_gradient(call)
    in_row = len(call.inputs[1 + backward].shape) == 1
    # The batch is whole, too, if the split of the targets depends on values.
    n = "n" + "!" * (in_row and call.op.endswith(".Tensor")) + "+" * (not backward)
    scores, alpha = f"t! {n} c!", f"{n} t! a!"
    given = [scores, "s!" if in_row else f"{n} s!"]
    why = "why a sample is aligned over all times, classes and labels"
    if backward:
        lengths = [n] * (len(call.inputs) - 5)
        left = ", ".join([n, *given, *lengths, n, alpha])
        return notation(call, f"{left} => {scores}; linear 0; {why}")
    left = ", ".join([*given, *[n] * (len(call.inputs) - 2)])
    return notation(call, f"{left} => {n}, {alpha}; {why}")


def _localize_ctc(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Pass the literal lengths of the rank's samples, and their part of a row of targets.

    The second output of the forward operator is widened to the width for all samples.
    """
    backward, literal = _is_gradient(call), not call.op.endswith(".Tensor")
    samples = shards.inputs[backward][1]
    whole = not is_cut(samples, call.inputs[backward].shape[1])
    if whole and (backward or literal):
        return run_as_is(call)
    builder, args, at = LocalProgramBuilder(), list(call.args), 1 + backward
    if literal:
        of_targets = argument(call, at + 2, "target_lengths")
        for place in (at + 1, at + 2):
            args[place] = argument(call, place, "")[slice(*samples)]
        if len(call.inputs[at].shape) == 1:
            bounds = (sum(of_targets[:end]) for end in samples)
            args[at] = builder("aten.slice.Tensor", args[at], 0, *bounds)
    if backward:
        return builder.program(builder(call.op, *args, **call.kwargs))
    loss, alpha = builder.several(2, call.op, *args, **call.kwargs)
    shape = shards.output_shape(1)
    padding = builder("aten.new_full.default", alpha, shape, float("-inf"))
    wide = builder("aten.cat.default", (alpha, padding), 2)
    return builder.program(loss, builder("aten.slice.Tensor", wide, 2, 0, shape[2]))


RULES = by_operator(
    {
        "_ctc_loss.Tensor _ctc_loss _ctc_loss_backward.Tensor _ctc_loss_backward": Rule(
            _ctc, _localize_ctc
        ),
        "binary_cross_entropy": _elementwise(3, weight=2),
        "binary_cross_entropy_backward": _elementwise(4, weight=3),
        "binary_cross_entropy_with_logits": _elementwise(4, weight=2),
        "huber_loss mse_loss smooth_l1_loss soft_margin_loss": _elementwise(2),
        "huber_loss_backward smooth_l1_loss_backward soft_margin_loss_backward": _elementwise(3),
        "mse_loss_backward": _elementwise(3, more="; linear 1 2"),
        "multi_margin_loss": _margin("x y w > l", 5, weight=4),
        "multi_margin_loss_backward": _margin("l x y w > x", 6, weight=5),
        "multilabel_margin_loss_backward": _margin("l x x x > x", 3),
        "multilabel_margin_loss_forward": _margin("x x > l x", 2),
        "nll_loss_forward nll_loss2d_forward": Rule(_nll, _localize_nll),
        "nll_loss_backward nll_loss2d_backward": Rule(_nll, _localize_nll_backward),
    }
)
