"""Fused attention: queries `b (h g) t d`, keys and values `b h s d`; each key serves `g` queries.

Forward, keys are needed whole (a softmax runs over them). Backward, where the log-sum-exp of the
softmax is given, they are not: gradients of queries are sums over keys, and those of keys and
values sums over queries.

A causal mask compares positions, which a shard of queries or keys has to count from its own start:
the CPU kernels take the mask of the shard instead; others have no such argument. With dropout
everything is whole: a shard would draw other random numbers. Kernels divide by the extents, so
shards may not be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from sbp_aten.rules.attention_call import SPLITTABLE, AttentionCall, AttentionKernel
from sbp_core.graph import Symbol
from sbp_core.signatures import (
    Dependence,
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    linear,
    opaque,
    run_as_is,
    with_literals,
)

_RAGGED = opaque("sequences that differ share one dim, or tables that say how they differ")


def _dependences(attention: AttentionCall, roles: Sequence[str]) -> tuple[Dependence, ...]:
    """Return in what attention is linear: the values; backward, the gradient of the output.

    The gradients of queries, keys and mask are those of scores, which are linear in values and
    output together (`dO V - sum(dO O)`); the gradient of the values depends on neither.
    """
    at = {name: index for index, name in enumerate(attention.types)}
    if not attention.kernel.backward:
        return (linear(at["value"], outputs=(0,)),)
    scores = tuple(index for index, role in enumerate(roles) if role != "value")
    return (linear(0), linear(at["value"], at["out"], outputs=scores))


def _meaning(kernel: AttentionKernel, call: OpCall) -> Notation:
    """Return `b (h g) t d!, b h s! d!, b h s! e! => b (h g) t e!, b (h g) t` and alike.

    Forward makes two products of queries (or alike) with keys (or alike), backward five; a causal
    mask halves each.
    """
    if kernel.is_ragged(call):
        return _RAGGED.notation(call)
    attention = AttentionCall(kernel, call)
    inputs = attention.inputs()
    roles, outputs = zip(*attention.outputs(), strict=True)
    reasons = list(attention.whole())
    present = {name for tensor in (*inputs, *outputs) for dim in tensor for name in dim}
    needed_whole = {name for group, _ in reasons for name in group}
    whole = present & (needed_whole | (present - SPLITTABLE - {"e"}))
    free = present - whole
    # Forward, what lacks a label does not depend on it (seeds); backward, it is a sum over it.
    unreduced = [
        (f"{label}@{index}", "none")
        for index, dims in enumerate(outputs)
        for label in sorted(free)
        if not kernel.backward and not any(label in dim for dim in dims)
    ]
    work = 2.0 * (5 if kernel.backward else 2) * prod(attention.sizes.values())
    return Notation(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        dependences=_dependences(attention, roles),
        whole=frozenset(whole),
        nonempty=frozenset() if kernel.composite else frozenset(free),
        reductions=tuple(unreduced),
        work_flop=work / 2 if attention.causal else work,
        why="; ".join(dict.fromkeys(reason for _, reason in reasons)),
    )


def _localize_causal_mask(
    kernel: AttentionKernel, call: OpCall, shards: Shards
) -> LocalCall | LocalProgram:
    """Give a shard whose positions do not begin at 0 its part of the causal mask as a tensor.

    Query t0 + i sees key s0 + j if s0 + j <= t0 + i: `triu(-inf, t0 - s0 + 1)` hides the others.
    `is_causal` on the shard would compare i and j, and hide too much or too little:

            keys  0 1 2 3
        query 0   o . . .      A rank that holds queries 2 and 3 (t0 = 2, s0 = 0) needs the last
              1   o o . .      two rows, `triu(-inf, 3)`; `is_causal` would give it the first two.
              2   o o o .
              3   o o o o
    """
    names = list(AttentionCall(kernel, call).types)
    query, key = names.index("query"), names.index("key")
    (query_start, query_stop), (key_start, key_stop) = (
        shards.inputs[query][-2],
        shards.inputs[key][-2],
    )
    if not kernel.named(call).get("is_causal") or query_start == key_start == 0:
        return run_as_is(call)
    builder = LocalProgramBuilder()
    dtype = Symbol("dtype", call.inputs[query].dtype)
    hidden = builder(
        "aten.full.default", (query_stop - query_start, key_stop - key_start), -inf, dtype=dtype
    )
    mask = builder("aten.triu.default", hidden, query_start - key_start + 1)
    masked = with_literals(
        call,
        (kernel.position("is_causal"), "is_causal", False),
        (kernel.position("attn_mask"), "attn_mask", mask),
    )
    made = builder.several(len(call.outputs), call.op, *masked.args, **masked.kwargs)
    return builder.program(*made)


def _rule(kernel: AttentionKernel) -> Rule:
    if not kernel.masks:
        return Rule(lambda call: _meaning(kernel, call))
    return Rule(
        lambda call: _meaning(kernel, call),
        lambda call, shards: _localize_causal_mask(kernel, call, shards),
    )


_GIVEN = "query key value"
_GRADIENTS = "query key value"
_SAVED = "out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
_EFFICIENT = AttentionKernel(
    arguments=f"{_GIVEN} attn_bias compute_log_sumexp dropout_p is_causal",
    outputs="out rows",
    pads=True,
)

_KERNELS = {
    "_efficient_attention_backward": AttentionKernel(
        arguments=f"grad_out_ {_GIVEN} bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
        " logsumexp dropout_p philox_seed philox_offset custom_mask_type bias_requires_grad",
        outputs=f"{_GRADIENTS} mask",
        order="bthd",
        backward=True,
        pads=True,
    ),
    "_efficient_attention_forward": AttentionKernel(
        arguments=f"{_GIVEN} bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p"
        " custom_mask_type compute_log_sumexp",
        outputs="out rows",
        order="bthd",
        pads=True,
    ),
    "_flash_attention_backward": AttentionKernel(
        arguments=f"grad_out {_GIVEN} {_SAVED} rng_state unused",
        outputs=_GRADIENTS,
        order="bthd",
        backward=True,
    ),
    "_flash_attention_forward": AttentionKernel(
        arguments=f"{_GIVEN} cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        outputs="out rows",
        order="bthd",
    ),
    "_scaled_dot_product_attention_math": AttentionKernel(
        arguments=f"{_GIVEN} attn_mask dropout_p is_causal dropout_mask",
        outputs="out mask",
        masks=True,
        composite=True,
    ),
    "_scaled_dot_product_cudnn_attention": replace(
        _EFFICIENT, arguments=f"{_EFFICIENT.arguments} return_debug_mask", pads=False
    ),
    "_scaled_dot_product_cudnn_attention_backward": AttentionKernel(
        arguments=f"grad_out {_GIVEN} out logsumexp philox_seed philox_offset attn_bias cum_seq_q"
        " cum_seq_k max_q max_k dropout_p is_causal",
        outputs=_GRADIENTS,
        backward=True,
    ),
    "_scaled_dot_product_efficient_attention": _EFFICIENT,
    "_scaled_dot_product_efficient_attention_backward": AttentionKernel(
        arguments=f"grad_out_ {_GIVEN} attn_bias out logsumexp philox_seed philox_offset dropout_p"
        " grad_input_mask is_causal",
        outputs=f"{_GRADIENTS} mask",
        backward=True,
        pads=True,
    ),
    "_scaled_dot_product_flash_attention": AttentionKernel(
        arguments=f"{_GIVEN} dropout_p is_causal return_debug_mask", outputs="out rows"
    ),
    "_scaled_dot_product_flash_attention_backward": AttentionKernel(
        arguments=f"grad_out {_GIVEN} {_SAVED} philox_seed philox_offset",
        outputs=_GRADIENTS,
        backward=True,
    ),
    "_scaled_dot_product_flash_attention_for_cpu": AttentionKernel(
        arguments=f"{_GIVEN} dropout_p is_causal", outputs="out rows", masks=True
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": AttentionKernel(
        arguments=f"grad_out {_GIVEN} out logsumexp dropout_p is_causal",
        outputs=_GRADIENTS,
        backward=True,
        masks=True,
    ),
}

RULES = {f"aten.{name}.default": _rule(kernel) for name, kernel in _KERNELS.items()}
