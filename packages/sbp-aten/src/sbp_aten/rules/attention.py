"""Sharding rules of fused attention: queries `b (h g) t d`, keys and values `b h s d`.

Labels: `b` batch, `h` heads of keys, `g` queries that share a head of keys, `t` queries, `s` keys,
`d` and `e` the head dims of keys and values; `u` to `z` further batch dims.

Forward needs all keys (a softmax runs over them). Backward gets the log-sum-exp of the softmax, so
it does not: gradients of queries are sums over keys, and gradients of keys and values are sums over
queries.

A causal mask compares positions, which a shard of queries or keys has to count from its start: the
CPU kernels get the mask of the shard as a tensor; other kernels have no such argument. With dropout
nothing may be split, because a shard would draw other random numbers. Kernels divide by the
extents, so shards may not be empty.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, prod

from sbp_aten.rules.formula import by_operator
from sbp_core.graph import Argument, Ref, Symbol
from sbp_core.signatures import (
    Dependence,
    Dim,
    Dims,
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    fresh_dims,
    linear,
    opaque,
    run_as_is,
    with_literals,
)

_BATCH = "uvwxyz"


#: Labels that may be split, unless `_Call.whole` names them.
_SPLITTABLE = frozenset(f"{_BATCH}bhgts")


#: Name of an argument -> its role; other tensors are whole (seeds, lengths).
_ROLES = {
    "grad_out": "out",
    "grad_out_": "out",
    "query": "query",
    "key": "key",
    "value": "value",
    "out": "out",
    "logsumexp": "rows",
    "attn_bias": "mask",
    "attn_mask": "mask",
    "bias": "mask",
    "dropout_mask": "mask",
}


#: Arguments for sequences that differ within a batch.
_RAGGED = (
    *("cu_seqlens_q", "cu_seqlens_k", "cum_seq_q", "cum_seq_k", "seqlen_k", "seqused_k"),
    *("alibi_slopes", "block_table"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """One fused attention operator: its arguments and restrictions.

    Args:
        arguments: Names of its arguments, in order.
        outputs: Roles of its first outputs; the other outputs are whole.
        order: Labels of the dims of a query, a letter each.
        backward: Whether it is a backward operator.
        masks: Whether a causal mask may be passed as a tensor instead.
        pads: Whether the log-sum-exp is padded to a multiple of 32 queries, and masks are aligned.
        composite: Whether it is composed of products and a softmax. Then empty shards are allowed,
            and values may have another head dim than keys.
    """

    arguments: str
    outputs: str
    order: str = "bhtd"
    backward: bool = False
    masks: bool = False
    pads: bool = False
    composite: bool = False

    def named(self, call: OpCall) -> dict[str, Argument]:
        """Return the arguments of a call by name, in order."""
        return {**dict(zip(self.arguments.split(), call.args, strict=False)), **call.kwargs}

    def is_ragged(self, call: OpCall) -> bool:
        """Return whether the sequences of the batch differ, in length or otherwise."""
        named = self.named(call)
        return any(named.get(name) is not None for name in _RAGGED)

    def position(self, name: str) -> int:
        """Return the position of an argument; one past the last if it is keyword-only."""
        listed = self.arguments.split()
        return listed.index(name) if name in listed else len(listed)


class _Call:
    """One call of a kernel: labels of its tensors, and the labels that may not be split."""

    def __init__(self, kernel: _Kernel, call: OpCall) -> None:
        self.kernel = kernel
        self.call = call
        self.named = kernel.named(call)
        tensors = [
            name
            for name, value in self.named.items()
            if isinstance(value, Ref) and value.name in call.tensor_names
        ]
        #: Types of the tensor arguments by name, in order.
        self.types = dict(zip(tensors, call.inputs, strict=True))
        query, key = self.types["query"].shape, self.types["key"].shape
        self._order = f"{_BATCH}{kernel.order}"[-len(query) :]
        #: Extents of the labels of queries and keys; `h` counts the heads of queries.
        self.sizes = dict(zip(self._order, query, strict=True))
        keys = dict(zip(self._order.replace("t", "s"), key, strict=True))
        self.sizes["s"] = keys["s"]
        self._heads: Dim = ("h",) if keys.get("h") == self.sizes.get("h") else ("h", "g")

    @property
    def causal(self) -> bool:
        """Whether positions of queries and keys are compared."""
        windows = ("window_size", "window_size_left", "window_size_right")
        return any(self.named.get(name) for name in ("is_causal", "custom_mask_type")) or any(
            self.named.get(name) is not None for name in windows
        )

    @property
    def mask(self) -> bool:
        """Whether a mask is given."""
        return any(_ROLES.get(name) == "mask" for name in self.types)

    def inputs(self) -> list[Dims]:
        """Return the dims of each tensor argument."""
        return [
            self._dims(_ROLES.get(name, "other"), entry.shape, f"i{index}_")
            for index, (name, entry) in enumerate(self.types.items())
        ]

    def outputs(self) -> list[tuple[str, Dims]]:
        """Return role and dims of each output; gradients that are not requested are left out."""
        wanted = self.named.get("grad_input_mask")
        roles = self.kernel.outputs.split()
        if isinstance(wanted, tuple):
            roles = [role for role, want in zip(roles, wanted, strict=True) if want]
        made = self.call.outputs
        roles = [*roles, *["other"] * len(made)][: len(made)]
        return [
            (role, self._dims(role, entry.shape, f"o{index}_"))
            for index, (role, entry) in enumerate(zip(roles, made, strict=True))
        ]

    def _dims(self, role: str, shape: Sequence[int], prefix: str) -> Dims:
        """Return the dims of a tensor in a role; `prefix` starts the labels of other tensors."""
        order = self._order
        if role in ("query", "out"):
            return self._dims_of_letters(
                order if role == "query" else order.replace("d", "e"), self._heads
            )
        if role in ("key", "value"):
            keys = order.replace("t", "s")
            return self._dims_of_letters(keys if role == "key" else keys.replace("d", "e"), ("h",))
        if role == "mask":
            letters = f"{_BATCH}bhts"[-len(shape) :] if shape else ""
            kept = [size == self.sizes[name] for name, size in zip(letters, shape, strict=True)]
            named = self._dims_of_letters(letters, self._heads)
            return tuple(dim if keep else () for dim, keep in zip(named, kept, strict=True))
        if role == "rows":
            fits = tuple(shape[:3]) == tuple(self.sizes[name] for name in "bht")
            rows = (
                self._dims_of_letters("bht", self._heads)
                if fits
                else (("b",), self._heads, (prefix,))
            )
            return (*rows, *((),) * (len(shape) - 3))
        return fresh_dims(len(shape), prefix)

    def _dims_of_letters(self, letters: str, heads: Dim) -> Dims:
        return tuple(heads if letter == "h" else (letter,) for letter in letters)

    def whole(self) -> Iterator[tuple[str, str]]:
        """Yield labels that may not be split, each with the reason."""
        named, kernel = self.named, self.kernel
        every = "".join(sorted(_SPLITTABLE))
        yield "d", "scores are sums over the head dim, before the softmax"
        if not kernel.composite:
            yield "e", "the kernel takes one head dim for keys and values"
        if named.get("dropout_p", 0.0) != 0:
            yield every, "a shard would drop other elements"
        if not kernel.backward:
            yield "s", "the softmax runs over all keys"
        if self.causal and (not kernel.masks or self.mask):
            yield "ts", "a causal mask counts positions from the start of queries and keys"
        if kernel.pads and (kernel.backward or named.get("compute_log_sumexp")):
            yield "t", "the log-sum-exp is padded to a multiple of 32 queries"
        if kernel.pads and self.mask:
            yield "s", "the kernel wants the rows of the mask aligned"


_PACKED = opaque("sequences that differ share one dim, or tables that say how they differ")


def _dependences(attention: _Call, roles: Sequence[str]) -> tuple[Dependence, ...]:
    """Return the linear arguments of attention: the values; backward, the output's gradient.

    The gradients of queries, keys and mask follow from the gradient of the scores, which is linear
    in values and output together (`dO V - sum(dO O)`); the gradient of the values needs neither.
    """
    at = {name: index for index, name in enumerate(attention.types)}
    if not attention.kernel.backward:
        return (linear(at["value"], outputs=(0,)),)
    scores = tuple(index for index, role in enumerate(roles) if role != "value")
    return (linear(0), linear(at["value"], at["out"], outputs=scores))


def _meaning(kernel: _Kernel, call: OpCall) -> Notation:
    """Return the notation, such as `b (h g) t d!, b h s! d!, b h s! e! => b (h g) t e!, b (h g) t`.

    The work is two products of size queries times keys forward, and five backward; a causal mask
    halves each.
    """
    if kernel.is_ragged(call):
        return _PACKED.notation(call)
    attention = _Call(kernel, call)
    inputs = attention.inputs()
    roles, outputs = zip(*attention.outputs(), strict=True)
    reasons = list(attention.whole())
    present = {name for tensor in (*inputs, *outputs) for dim in tensor for name in dim}
    needed_whole = {name for group, _ in reasons for name in group}
    whole = present & (needed_whole | (present - _SPLITTABLE - {"e"}))
    free = present - whole
    # An output without a label does not depend on it in forward (seeds); backward sums over it.
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
    kernel: _Kernel, call: OpCall, shards: Shards
) -> LocalCall | LocalProgram:
    """Pass the causal mask of a shard as a tensor, if its positions do not begin at 0.

    Query t0 + i sees key s0 + j if s0 + j <= t0 + i: `triu(-inf, t0 - s0 + 1)` hides other keys.
    `is_causal` on the shard would compare i and j, and hide too many or too few keys:

            keys  0 1 2 3
        query 0   o . . .      A rank that holds queries 2 and 3 (t0 = 2, s0 = 0) needs the last
              1   o o . .      two rows, `triu(-inf, 3)`; `is_causal` would give it the first two.
              2   o o o .
              3   o o o o
    """
    names = list(_Call(kernel, call).types)
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


_GIVEN = "query key value"
_SAVED = "out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
_EFFICIENT = f"{_GIVEN} attn_bias compute_log_sumexp dropout_p is_causal"

_forward = partial(_Kernel, outputs="out rows")
_gradients = partial(_Kernel, outputs=_GIVEN, backward=True)
_with_mask = partial(_Kernel, outputs=f"{_GIVEN} mask", backward=True, pads=True)

_KERNELS = {
    "_efficient_attention_backward": _with_mask(
        arguments=f"grad_out_ {_GIVEN} bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
        " logsumexp dropout_p philox_seed philox_offset custom_mask_type bias_requires_grad",
        order="bthd",
    ),
    "_efficient_attention_forward": _forward(
        arguments=f"{_GIVEN} bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p"
        " custom_mask_type compute_log_sumexp",
        order="bthd",
        pads=True,
    ),
    "_flash_attention_backward": _gradients(
        arguments=f"grad_out {_GIVEN} {_SAVED} rng_state unused", order="bthd"
    ),
    "_flash_attention_forward": _forward(
        arguments=f"{_GIVEN} cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        order="bthd",
    ),
    "_scaled_dot_product_attention_math": _Kernel(
        arguments=f"{_GIVEN} attn_mask dropout_p is_causal dropout_mask",
        outputs="out mask",
        masks=True,
        composite=True,
    ),
    "_scaled_dot_product_cudnn_attention": _forward(arguments=f"{_EFFICIENT} return_debug_mask"),
    "_scaled_dot_product_cudnn_attention_backward": _gradients(
        arguments=f"grad_out {_GIVEN} out logsumexp philox_seed philox_offset attn_bias cum_seq_q"
        " cum_seq_k max_q max_k dropout_p is_causal"
    ),
    "_scaled_dot_product_efficient_attention": _forward(arguments=_EFFICIENT, pads=True),
    "_scaled_dot_product_efficient_attention_backward": _with_mask(
        arguments=f"grad_out_ {_GIVEN} attn_bias out logsumexp philox_seed philox_offset dropout_p"
        " grad_input_mask is_causal"
    ),
    "_scaled_dot_product_flash_attention": _forward(
        arguments=f"{_GIVEN} dropout_p is_causal return_debug_mask"
    ),
    "_scaled_dot_product_flash_attention_backward": _gradients(
        arguments=f"grad_out {_GIVEN} {_SAVED} philox_seed philox_offset"
    ),
    "_scaled_dot_product_flash_attention_for_cpu": _forward(
        arguments=f"{_GIVEN} dropout_p is_causal", masks=True
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _gradients(
        arguments=f"grad_out {_GIVEN} out logsumexp dropout_p is_causal", masks=True
    ),
}

RULES = by_operator(
    {
        name: Rule(
            partial(_meaning, kernel),
            partial(_localize_causal_mask, kernel) if kernel.masks else None,
        )
        for name, kernel in _KERNELS.items()
    }
)
