"""Grouped matrix products, for mixtures of experts: offsets say which tokens an expert has.

    t d, e d f, o! => t f        tokens times the weights of their expert
    m t, t n, o! => e m n        the gradient of the weights: a product for each expert
    e m k, k t, o! => m t        the mirror image of the first
    e m k, e k n => e m n        a batch of products, without offsets

    t d, e d f, o!, t f => t d, e d f        both gradients of the first, in one call

Tokens may be split: offsets then count local ones. A rank that holds some of the experts brings
their tokens to the front, and gives zeros for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from sbp_aten.rules.windows import given, is_cut, length, only_zeros
from sbp_core.graph import ITEMSIZE, Ref
from sbp_core.signatures import (
    Dims,
    Draft,
    LocalCall,
    LocalProgram,
    Notation,
    OpCall,
    Range,
    Rule,
    Shards,
    labels,
    linear,
    unchanged,
)

#: Labels of the operands and of the result, a letter a dim, by the number of dims of the operands.
_FORMS = {
    (2, 3): ("td", "edf", "tf"),
    (2, 2): ("mt", "tn", "emn"),
    (3, 2): ("emk", "kt", "mt"),
    (3, 3): ("emk", "ekn", "emn"),
}

#: Rows of the operands have to begin at multiples of so many bytes.
_ALIGNMENT_BYTES = 16


def _form(call: OpCall) -> tuple[str, str, str]:
    return _FORMS[len(call.inputs[0].shape), len(call.inputs[1].shape)]


def _dims(names: str) -> Dims:
    return tuple((name,) for name in names)


def _notation(call: OpCall) -> Notation:
    """Return the notation of a form; see the module docstring."""
    left, right, made = _form(call)
    extents = dict(zip(left + right, call.inputs[0].shape + call.inputs[1].shape, strict=True))
    if "t" in extents:
        # Each token meets one expert.
        extents["e"] = 1
    others = [
        tuple(labels(f"o{at}_", len(entry.shape))) for at, entry in enumerate(call.inputs[2:])
    ]
    return Notation(
        inputs=(_dims(left), _dims(right), *(tuple((name,) for name in names) for names in others)),
        outputs=(_dims(made),),
        dependences=(linear(0), linear(1)),
        whole=frozenset(name for names in others for name in names),
        work_flop=2.0 * prod(extents.values()),
        why="offsets count tokens from the first group on" if others else "",
    )


def _windows(call: OpCall, shards: Shards) -> tuple[dict[str, Range], set[str]]:
    """Return the window of each label, and the labels that are cut."""
    windows: dict[str, Range] = {}
    cut: set[str] = set()
    types = (*call.inputs[:2], *call.outputs)
    for names, entry, bounds in zip(
        _form(call), types, (*shards.inputs[:2], *shards.outputs), strict=True
    ):
        for name, extent, window in zip(names, entry.shape, bounds, strict=True):
            # What is summed away is cut in both operands.
            windows[name] = window
            cut |= {name} if is_cut(window, extent) else set()
    return windows, cut


def _paddings(call: OpCall, windows: Mapping[str, Range], cut: set[str]) -> dict[str, int]:
    """Return how many elements labels lack until rows are aligned, for those that lack any.

    Shards are cut out of tensors of either order of dims, so what is cut is aligned in any case.
    """
    multiple = max(_ALIGNMENT_BYTES // ITEMSIZE[call.inputs[0].dtype], 1)
    left, right, _ = _form(call)
    lacking = {name: -length(windows[name]) % multiple for name in {left[-1], right[-1]} | cut}
    return {name: count for name, count in lacking.items() if count and name != "e"}


class _Experts:
    """Brings the tokens of a window of the experts to the front, and back.

    Args:
        draft: Takes the calls.
        offsets: Where each expert's tokens end; all experts.
        experts: The window.
        num_tokens: Number of tokens, at least one.
    """

    def __init__(self, draft: Draft, offsets: Ref, experts: Range, num_tokens: int) -> None:
        self._draft = draft
        self._num_tokens = num_tokens
        self._first: Ref | None = None
        own = draft("aten.slice.Tensor", offsets, 0, *experts)
        if experts[0]:
            self._first = draft("aten.select.int", offsets, 0, experts[0] - 1)
            own = draft("aten.sub.Tensor", own, self._first)
        self.offsets = own
        ones = draft("aten.new_ones.default", offsets, (num_tokens,))
        counted = draft("aten.cumsum.default", ones, 0)
        self._place = draft("aten.sub.Tensor", counted, 1)

    def to_front(self, tensor: Ref, dim: int) -> Ref:
        """Turn the tokens around so that those of the window come first."""
        return self._turned(tensor, dim, "aten.add.Tensor")

    def back(self, tensor: Ref, dim: int, num_dims: int) -> Ref:
        """Put zeros for tokens of other experts, and turn the tokens back."""
        draft = self._draft
        last = draft("aten.select.int", self.offsets, 0, -1)
        beyond = draft("aten.ge.Tensor", self._place, last)
        for _ in range(num_dims - 1 - dim):
            beyond = draft("aten.unsqueeze.default", beyond, -1)
        tensor = draft("aten.masked_fill.Scalar", tensor, beyond, 0)
        return self._turned(tensor, dim, "aten.sub.Tensor")

    def _turned(self, tensor: Ref, dim: int, step: str) -> Ref:
        if self._first is None:
            return tensor
        place = self._draft(step, self._place, self._first)
        place = self._draft("aten.remainder.Scalar", place, self._num_tokens)
        return self._draft("aten.index_select.default", tensor, dim, place)


def _padded(draft: Draft, tensor: Ref, names: str, paddings: Mapping[str, int]) -> Ref:
    """Put zeros behind a tensor until its rows are aligned."""
    amounts = [amount for name in reversed(names) for amount in (0, paddings.get(name, 0))]
    return (
        draft("aten.constant_pad_nd.default", tensor, tuple(amounts), 0) if any(amounts) else tensor
    )


def _shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Let offsets count local tokens, bring those of local experts to the front, align rows."""
    (left, right, offsets, *rest), named = given(call, ("self", "mat2", "offs"))
    forms = _form(call)
    windows, cut = _windows(call, shards)
    if not all(map(length, windows.values())):
        return only_zeros(left, shards.output_shape())
    paddings = _paddings(call, windows, cut)
    if (offsets is None and not paddings) or (not paddings and not cut & {"t", "e"}):
        return unchanged(call)
    draft = Draft()
    operands = [left, right]
    experts: _Experts | None = None
    if offsets is not None and "t" in cut:
        offsets = _local_offsets(draft, offsets, windows["t"])
    if offsets is not None and "e" in cut:
        experts = _Experts(draft, offsets, windows["e"], length(windows["t"]))
        offsets = experts.offsets
        operands = [
            experts.to_front(operand, names.index("t")) if "t" in names else operand
            for operand, names in zip(operands, forms, strict=False)
        ]
    operands = [
        _padded(draft, operand, names, paddings)
        for operand, names in zip(operands, forms, strict=False)
    ]
    made = draft(call.op, *operands, offsets, *rest, **named)
    for dim, name in enumerate(forms[2]):
        if name in paddings:
            made = draft("aten.slice.Tensor", made, dim, 0, length(windows[name]))
    if experts is not None and "t" in forms[2]:
        made = experts.back(made, forms[2].index("t"), len(forms[2]))
    return draft.program(made)


def _gradients(call: OpCall) -> Notation:
    """Return the notation of a call (tokens, weights, offsets, gradient) -> both gradients."""
    t, d, e, f, o = "tdefo"
    (tokens, inner), (_, _, outer) = (entry.shape for entry in call.inputs[:2])
    return Notation(
        inputs=(_dims(t + d), _dims(e + d + f), _dims(o), _dims(t + f)),
        outputs=(_dims(t + d), _dims(e + d + f)),
        dependences=(linear(3), linear(0, outputs=(1,)), linear(1, outputs=(0,)), linear(0, 1)),
        whole=frozenset(o),
        nonempty=frozenset((t, d, e, f)),
        work_flop=4.0 * tokens * inner * outer,
        why="offsets count tokens from the first group on",
    )


def _gradients_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Let offsets count local tokens, bring those of local experts to the front."""
    tokens, weights, offsets, gradient = call.args
    assert isinstance(tokens, Ref) and isinstance(offsets, Ref) and isinstance(gradient, Ref)
    own, (experts, *_) = shards.inputs[0][0], shards.inputs[1]
    is_cut_t = is_cut(own, call.inputs[0].shape[0])
    is_cut_e = is_cut(experts, call.inputs[1].shape[0])
    if not is_cut_t and not is_cut_e:
        return unchanged(call)
    draft = Draft()
    if is_cut_t:
        offsets = _local_offsets(draft, offsets, own)
    if not is_cut_e:
        return draft.program(*draft.several(2, call.op, tokens, weights, offsets, gradient))
    turned = _Experts(draft, offsets, experts, length(own))
    tokens, gradient = (turned.to_front(each, 0) for each in (tokens, gradient))
    of_tokens, of_weights = draft.several(2, call.op, tokens, weights, turned.offsets, gradient)
    return draft.program(turned.back(of_tokens, 0, 2), of_weights)


def _local_offsets(draft: Draft, offsets: Ref, tokens: Range) -> Ref:
    """Count the tokens of a window only."""
    offsets = draft("aten.sub.Tensor", offsets, tokens[0])
    return draft("aten.clamp.default", offsets, 0, length(tokens))


#: Of any operator that takes (operand, operand, offsets) as `_grouped_mm` does.
PRODUCT = Rule(_notation, _shard)

#: Of any operator (tokens, weights, offsets, gradient) -> (of the tokens, of the weights).
GRADIENTS = Rule(_gradients, _gradients_shard)

RULES = {"aten._grouped_mm.default": PRODUCT}
