"""Losses. A sum over samples gives partial sums; a mean needs all samples, for their number."""

from __future__ import annotations

from sbp_core.signatures.arguments import argument, labels
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dim, Dims, Notation, linear
from sbp_core.signatures.rule import Rule
from sbp_core.signatures.rules.pointwise import broadcast_dims

#: PyTorch's numbers for `reduction=`.
_NONE, _MEAN = 0, 1


def _samples(call: OpCall, scores: int) -> tuple[Dims, Dims, tuple[Dims, ...]]:
    """Return dims of the scores, of the targets, and of the class weights if they are given."""
    shape = call.inputs[scores].shape
    targets: tuple[Dim, ...] = (("n",),) if len(shape) == 2 else ()
    weighted = argument(call, 2 + scores, "weight") is not None
    return (*targets, ("c",)), targets, ((("c",),),) if weighted else ()


def _nll_forward(call: OpCall) -> Notation:
    """Scores `n c!`, targets `n` => loss, total weight; the loss is linear in the scores."""
    scores, targets, weight = _samples(call, 0)
    reduction = argument(call, 3, "reduction")
    return Notation(
        inputs=(scores, targets, *weight),
        outputs=(targets if reduction == _NONE else (), ()),
        dependences=(linear(0, outputs=(0,)),),
        whole=frozenset("cn" if reduction == _MEAN and targets else "c"),
    )


def _nll_backward(call: OpCall) -> Notation:
    """The total weight is given, so samples may be split whatever the reduction was."""
    scores, targets, weight = _samples(call, 1)
    gradient = targets if argument(call, 4, "reduction") == _NONE else ()
    return Notation(
        inputs=(gradient, scores, targets, *weight, ()),
        outputs=(scores,),
        dependences=(linear(0),),
        whole=frozenset("c"),
    )


def _mse(call: OpCall) -> Notation:
    reduction = argument(call, 2, "reduction", _MEAN)
    pair = [entry.shape for entry in call.inputs]
    return _squares(call, pair, reduction, backward=False)


def _mse_backward(call: OpCall) -> Notation:
    """The gradient of a mean is divided by the number of elements, so nothing may be split."""
    pair = [entry.shape for entry in call.inputs[1:]]
    return _squares(call, pair, argument(call, 3, "reduction"), backward=True)


def _squares(
    call: OpCall, pair: list[tuple[int, ...]], reduction: int, *, backward: bool
) -> Notation:
    wide = max(pair, key=len)
    target = tuple(
        max(shape[dim - len(wide)] for shape in pair if len(shape) >= len(wide) - dim)
        for dim in range(len(wide))
    )
    operands = tuple(broadcast_dims(shape, target) for shape in pair)
    names = list(labels("d", len(target)))
    full = tuple((name,) for name in names)
    gradient = (broadcast_dims(call.inputs[0].shape, target),) if backward else ()
    return Notation(
        inputs=(*gradient, *operands),
        outputs=(full if backward or reduction == _NONE else (),),
        dependences=(linear(0),) if backward else (),
        whole=frozenset(names) if reduction == _MEAN else frozenset(),
    )


RULES = {
    "aten.mse_loss.default": Rule(_mse),
    "aten.mse_loss_backward.default": Rule(_mse_backward),
    "aten.nll_loss_backward.default": Rule(_nll_backward),
    "aten.nll_loss_forward.default": Rule(_nll_forward),
}
