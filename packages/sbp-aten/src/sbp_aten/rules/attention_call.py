"""Calls of fused attention: what each tensor is, in labels, and which labels have to be whole.

Labels: `b` batch, `h` heads of keys, `g` queries that share a head of keys, `t` queries, `s` keys,
`d` and `e` the head dims of keys and values; `u` to `z` further batch dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp_core.graph import Argument, Ref
from sbp_core.signatures import Dim, Dims, OpCall, labels

_BATCH = "uvwxyz"

#: Labels that may be split, unless `AttentionCall.whole` names them.
SPLITTABLE = frozenset(f"{_BATCH}bhgts")

#: What a tensor is, by the name of the argument; any other is whole (seeds, lengths).
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

#: Arguments of a batch of sequences that differ.
_RAGGED = (
    *("cu_seqlens_q", "cu_seqlens_k", "cum_seq_q", "cum_seq_k", "seqlen_k", "seqused_k"),
    *("alibi_slopes", "block_table"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """One fused attention operator: its arguments, and what it restricts.

    Args:
        arguments: Names of its arguments, in order.
        outputs: Roles of its first outputs; any other is whole.
        order: Letters of the dims of a query.
        backward: Whether it is a backward operator.
        masks: Whether a causal mask may be given as a mask instead.
        pads: Whether the log-sum-exp is padded to a multiple of 32 queries, and masks are aligned.
        composite: Whether it is composed of products and a softmax, which take empty shards, and
            values of another head dim than keys.
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
        """Return the position of an argument; one past the last if it can be given by name only."""
        listed = self.arguments.split()
        return listed.index(name) if name in listed else len(listed)


class AttentionCall:
    """One call of a kernel: its tensors in labels, and the labels that may not be split."""

    def __init__(self, kernel: AttentionKernel, call: OpCall) -> None:
        self.kernel = kernel
        self.call = call
        self.named = kernel.named(call)
        tensors = [name for name, value in self.named.items() if self._is_tensor(value)]
        #: Types of the tensor arguments by name, in order.
        self.types = dict(zip(tensors, call.inputs, strict=True))
        query, key = self.types["query"].shape, self.types["key"].shape
        self._order = f"{_BATCH}{kernel.order}"[-len(query) :]
        #: Extents of the labels of queries and keys; `h` counts the heads of queries.
        self.sizes = dict(zip(self._order, query, strict=True))
        keys = dict(zip(self._order.replace("t", "s"), key, strict=True))
        self.sizes["s"] = keys["s"]
        self._heads: Dim = ("h",) if keys.get("h") == self.sizes.get("h") else ("h", "g")

    def _is_tensor(self, value: Argument) -> bool:
        return isinstance(value, Ref) and value.name in self.call.tensor_names

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
        """Return role and dims of each output; gradients that are not wanted are left out."""
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
        """Return the dims of a tensor in a role; `prefix` is that of labels of any other tensor."""
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
        return tuple((name,) for name in labels(prefix, len(shape)))

    def _dims_of_letters(self, letters: str, heads: Dim) -> Dims:
        return tuple(heads if letter == "h" else (letter,) for letter in letters)

    def whole(self) -> Iterator[tuple[str, str]]:
        """Yield labels that may not be split, and why."""
        named, kernel = self.named, self.kernel
        every = "".join(sorted(SPLITTABLE))
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
