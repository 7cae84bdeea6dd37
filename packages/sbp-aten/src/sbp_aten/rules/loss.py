"""Losses of pairs of tensors and margin losses, forward and backward; see also `nll` and `ctc`.

    mse_loss, reduction none     d0 d1, d0 d1 => d0 d1
    mse_loss, sum or mean        d0 d1, d0 d1 => ()
    its backward                 (), d0 d1, d0 d1 => d0 d1; linear 0; linear 1 2
    multi_margin_loss, sum       n+ c!, n+, c! => (); linear 2

A mean runs over all elements (samples), so a shard has a part of it, and its gradient divides by
the number of all; see `means`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from sbp_aten.rules.means import part_of_gradient, part_of_mean
from sbp_core.signatures import (
    Bounds,
    Dependence,
    Dims,
    LocalCall,
    LocalProgram,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    broadcast_dims,
    broadcast_shape,
    fresh_dims,
    linear,
    run_as_is,
    tensor_position,
    with_literals,
)

#: PyTorch's numbers for `reduction=`.
NONE, MEAN, SUM = 0, 1, 2

_CLASSES = "the score of the target is compared with those of all classes"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How a loss is called.

    Args:
        reduction: Position of the argument `reduction`.
        gradient: Whether argument 0 is the gradient of the loss.
        weight: Position of the argument `weight`; None if it has none.
        dependences: In what it is linear, apart from gradient and weight.
    """

    reduction: int
    gradient: bool = False
    weight: int | None = None
    dependences: tuple[Dependence, ...] = ()

    def reduces(self, call: OpCall) -> int:
        """Return which reduction a call asks for."""
        return int(argument(call, self.reduction, "reduction", MEAN))

    def linear_in(self, call: OpCall) -> tuple[Dependence, ...]:
        """Return in what a call is linear."""
        at = None if self.weight is None else tensor_position(call, self.weight, "weight")
        return (
            *((linear(0),) if self.gradient else ()),
            *self.dependences,
            *(() if at is None else (linear(at),)),
        )

    def part(self, call: OpCall, local: int, total: int) -> LocalCall | LocalProgram:
        """Return what a rank runs that holds `local` of `total` samples."""
        if self.reduces(call) != MEAN:
            return run_as_is(call)
        if self.gradient:
            return part_of_gradient(call, local, total)
        summed = with_literals(call, (self.reduction, "reduction", SUM))
        return part_of_mean(call, local, total, summed)


def _elementwise(family: _Family) -> Rule:
    """Return the rule of a loss of each element, which are broadcast and then reduced."""
    first = int(family.gradient)

    def meaning(call: OpCall) -> Notation:
        wide = broadcast_shape([entry.shape for entry in call.inputs[first:]])
        return Notation(
            inputs=tuple(broadcast_dims(entry.shape, wide) for entry in call.inputs),
            outputs=(broadcast_dims(call.outputs[0].shape, wide),),
            dependences=family.linear_in(call),
            work_flop=float(prod(wide)),
        )

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        shapes = [entry.shape for entry in call.inputs]
        held = [_extents(bounds) for bounds in shards.inputs]
        if family.gradient:
            # These divide by the elements of the first of the pair, before it is broadcast.
            return family.part(call, prod(held[1]), prod(shapes[1]))
        return family.part(call, prod(broadcast_shape(held)), prod(broadcast_shape(shapes)))

    return Rule(meaning, localize)


def _extents(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


def _margin(family: _Family, tensors: Callable[[OpCall, Dims, Dims], list[Dims]]) -> Rule:
    """Return the rule of a loss that compares the classes of each sample.

    Args:
        family: How it is called.
        tensors: From the dims of scores (`n c`) and of samples (`n`), those of all arguments, then
            outputs, that a call may have.
    """
    at = int(family.gradient)

    def meaning(call: OpCall) -> Notation:
        batched = len(call.inputs[at].shape) == 2
        samples: Dims = (("n",),) if batched else ()
        scores: Dims = (*samples, ("c",)) if call.inputs[at].shape else ()
        dims = tensors(call, scores, samples)
        inputs = len(call.inputs)
        # Kernels sum nothing, not even to zero, where there are no samples.
        partial = batched and not at and family.reduces(call) != NONE
        own = {name for tensor in dims for (name,) in tensor} - {"n"}
        return Notation(
            inputs=tuple(dims[:inputs]),
            outputs=tuple(dims[inputs:]),
            dependences=family.linear_in(call),
            whole=frozenset(own),
            nonempty=frozenset("n" if partial else ""),
            why=_CLASSES,
        )

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        bounds, shape = shards.inputs[at], call.inputs[at].shape
        held, total = (_extents(bounds)[0], shape[0]) if len(shape) == 2 else (1, 1)
        return family.part(call, held, total)

    return Rule(meaning, localize)


def _losses(call: OpCall, reduction: int, samples: Dims) -> Dims:
    """Return the dims of a loss, or of its gradient."""
    return samples if argument(call, reduction, "reduction", MEAN) == NONE else ()


def _multi_margin(call: OpCall, scores: Dims, samples: Dims) -> list[Dims]:
    weight: list[Dims] = [(("c",),)] * (len(call.inputs) - 2)
    targets = samples or fresh_dims(len(call.inputs[1].shape), "t")
    return [scores, targets, *weight, _losses(call, 5, samples)]


def _multi_margin_backward(call: OpCall, scores: Dims, samples: Dims) -> list[Dims]:
    weight: list[Dims] = [(("c",),)] * (len(call.inputs) - 3)
    targets = samples or fresh_dims(len(call.inputs[2].shape), "t")
    return [_losses(call, 6, samples), scores, targets, *weight, scores]


def _multilabel(call: OpCall, scores: Dims, samples: Dims) -> list[Dims]:
    return [scores, scores, _losses(call, 2, samples), scores]


def _multilabel_backward(call: OpCall, scores: Dims, samples: Dims) -> list[Dims]:
    return [_losses(call, 3, samples), scores, scores, scores, scores]


RULES = {
    "aten.binary_cross_entropy.default": _elementwise(_Family(reduction=3, weight=2)),
    "aten.binary_cross_entropy_backward.default": _elementwise(
        _Family(reduction=4, gradient=True, weight=3)
    ),
    "aten.binary_cross_entropy_with_logits.default": _elementwise(_Family(reduction=4, weight=2)),
    "aten.huber_loss.default": _elementwise(_Family(reduction=2)),
    "aten.huber_loss_backward.default": _elementwise(_Family(reduction=3, gradient=True)),
    "aten.mse_loss.default": _elementwise(_Family(reduction=2)),
    "aten.mse_loss_backward.default": _elementwise(
        _Family(reduction=3, gradient=True, dependences=(linear(1, 2),))
    ),
    "aten.multi_margin_loss.default": _margin(_Family(reduction=5, weight=4), _multi_margin),
    "aten.multi_margin_loss_backward.default": _margin(
        _Family(reduction=6, gradient=True, weight=5), _multi_margin_backward
    ),
    "aten.multilabel_margin_loss_backward.default": _margin(
        _Family(reduction=3, gradient=True), _multilabel_backward
    ),
    "aten.multilabel_margin_loss_forward.default": _margin(_Family(reduction=2), _multilabel),
    "aten.smooth_l1_loss.default": _elementwise(_Family(reduction=2)),
    "aten.smooth_l1_loss_backward.default": _elementwise(_Family(reduction=3, gradient=True)),
    "aten.soft_margin_loss.default": _elementwise(_Family(reduction=2)),
    "aten.soft_margin_loss_backward.default": _elementwise(_Family(reduction=3, gradient=True)),
}
