"""Embeddings: rows of a table. The vocabulary stays whole."""

from __future__ import annotations

from sbp_core.signatures.arguments import argument, labels
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Notation, linear
from sbp_core.signatures.rule import Rule


def _embedding(call: OpCall) -> Notation:
    places = tuple((name,) for name in labels("i", len(call.inputs[1].shape)))
    return Notation(
        inputs=((("v",), ("d",)), places),
        outputs=((*places, ("d",)),),
        dependences=(linear(0),),
        whole=frozenset("v"),
    )


def _embedding_backward(call: OpCall) -> Notation:
    """Each place adds its gradient to its row: places are summed away.

    With `scale_grad_by_freq` the count of a row over all places matters, so they stay whole.
    """
    names = list(labels("i", len(call.inputs[1].shape)))
    places = tuple((name,) for name in names)
    counts = bool(argument(call, 4, "scale_grad_by_freq", False))
    return Notation(
        inputs=((*places, ("d",)), places),
        outputs=((("v",), ("d",)),),
        dependences=(linear(0),),
        whole=frozenset(["v", *(names if counts else ())]),
    )


RULES = {
    "aten.embedding.default": Rule(_embedding),
    "aten.embedding_dense_backward.default": Rule(_embedding_backward),
}
