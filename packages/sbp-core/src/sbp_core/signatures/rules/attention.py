"""Fused attention: queries `b h t d`, keys and values `b h s d`.

Shards may not be empty: the kernels divide by the extents. Keys are needed whole (a softmax runs
over them), and under a causal mask queries too, since a query's position decides what it sees.
With dropout everything is: a shard would draw other random numbers.
"""

from __future__ import annotations

from math import prod

from sbp_core.signatures.arguments import argument
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dims, Notation, linear
from sbp_core.signatures.rule import Rule


def _dims(text: str) -> Dims:
    return tuple((label,) for label in text.split())


def _mask(call: OpCall, batch: tuple[int, ...]) -> tuple[Dims, ...]:
    """Return the dims of the additive mask, if there is one; it is broadcast to `b h t s`."""
    if call.kwargs.get("attn_mask") is None:
        return ()
    shape = call.inputs[-1].shape
    wide = dict(zip("bhts", batch, strict=True))
    names = "bhts"[4 - len(shape) :]
    pairs = zip(names, shape, strict=True)
    return (tuple((name,) if extent == wide[name] else () for name, extent in pairs),)


def _attention(call: OpCall, query: int, matmuls: int) -> Notation:
    """Return the notation of the forward operator, or of the backward one.

    Args:
        call: The call.
        query: Position of the queries among the tensor arguments: 0, or 1 behind the gradient.
        matmuls: How many products of queries (or alike) with keys (or alike) the kernel makes; a
            causal mask halves each.
    """
    batch, heads, times, depth = call.inputs[query].shape
    keys = call.inputs[query + 1].shape
    causal = bool(argument(call, 4 if query == 0 else 7, "is_causal", False))
    asks, holds, sums = _dims("b h t d"), _dims("b h s d"), _dims("b h t")
    backward = query == 1
    inputs = (asks, asks, holds, holds, asks, sums) if backward else (asks, holds, holds)
    outputs = (asks, holds, holds) if backward else (asks, sums)
    mask = _mask(call, (batch, heads, times, keys[2]))
    random = argument(call, 3 if query == 0 else 6, "dropout_p", 0.0) != 0
    free = "" if random else "bh" if causal else "bht"
    work = 2.0 * matmuls * prod((batch, heads, times, keys[2], depth))
    return Notation(
        inputs=(*inputs, *mask),
        outputs=outputs,
        dependences=(linear(0) if backward else linear(2, outputs=(0,)),),
        whole=frozenset("bhtsd") - frozenset(free),
        nonempty=frozenset(free),
        work_flop=work / 2 if causal else work,
    )


RULES = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": Rule(
        lambda call: _attention(call, query=0, matmuls=2)
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": Rule(
        lambda call: _attention(call, query=1, matmuls=5)
    ),
}
