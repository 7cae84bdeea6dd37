"""Matrix products: sums of products, so that the notation says everything."""

from __future__ import annotations

from dataclasses import replace

from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dims, Notation
from sbp_core.signatures.rule import Rule, parsed
from sbp_core.signatures.rules.pointwise import broadcast_dims


def _with_bias(text: str) -> Rule:
    """Return the rule of a product to which a first argument, broadcast, is added."""

    def meaning(call: OpCall) -> Notation:
        product = parsed(text)
        shape = call.outputs[0].shape
        names = {f"d{dim}": label for dim, label in enumerate(product.outputs[0])}
        bias: Dims = tuple(
            names[dim[0]] if dim else () for dim in broadcast_dims(call.inputs[0].shape, shape)
        )
        return replace(product, inputs=(bias, *product.inputs), addends=(0, 1, 1))

    return Rule(meaning)


RULES = {
    "aten.addmm.default": _with_bias("i k, k j -> i j"),
    "aten.baddbmm.default": _with_bias("n i k, n k j -> n i j"),
    "aten.bmm.default": Rule("n i k, n k j -> n i j"),
    "aten.dot.default": Rule("k, k -> ()"),
    "aten.mm.default": Rule("i k, k j -> i j"),
    "aten.mv.default": Rule("i k, k -> i"),
}
