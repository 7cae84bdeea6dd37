"""Sharding rules of grouped matrix products, for mixtures of experts.

Offsets assign tokens to experts: each gives the end of an expert's tokens.

    t d, e d f, o! => t f        tokens times the weights of their expert
    m t, t n, o! => e m n        the gradient of the weights: a product for each expert
    e m k, k t, o! => m t        the mirror image of the first
    e m k, e k n => e m n        a batch of products, without offsets
    t d, e d f, o!, t f => t d, e d f        both gradients of the first, in one call

Tokens may be split: offsets then count local tokens. A rank that holds some of the experts rotates
their tokens to the front, and returns zeros for the other tokens.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from sbp_aten.rules.formula import notation
from sbp_aten.rules.windows import given, is_cut, length, only_zeros
from sbp_core.graph import ITEMSIZE, Ref
from sbp_core.signatures import (
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Range,
    Rule,
    Shards,
    run_as_is,
)

#: Labels of the operands and of the result, a letter a dim, by the number of dims of the operands.
_FORMS = {
    (2, 3): ("td", "edf", "tf"),
    (2, 2): ("mt", "tn", "emn"),
    (3, 2): ("emk", "kt", "mt"),
    (3, 3): ("emk", "ekn", "emn"),
}

_OFFSETS = "offsets count tokens from the first group on"

#: Rows of the operands have to begin at multiples of this number of bytes.
_ALIGNMENT_BYTES = 16


def _operand_labels(call: OpCall) -> tuple[str, str, str]:
    return _FORMS[len(call.inputs[0].shape), len(call.inputs[1].shape)]


def _notation(call: OpCall) -> Notation:
    """Return the notation of a product by the ranks of its operands; see the module docstring."""
    left, right, made = map(" ".join, _operand_labels(call))
    shapes = call.inputs[0].shape + call.inputs[1].shape
    extents = dict(zip((left + " " + right).split(), shapes, strict=True))
    if "t" in extents:
        # Each token is multiplied by the weights of one expert only.
        extents["e"] = 1
    others = "".join(f", o{at}_*!" for at in range(len(call.inputs) - 2))
    work = 2.0 * prod(extents.values())
    formula = f"{left}, {right}{others} => {made}"
    return notation(call, f"{formula}; linear 0; linear 1; flop {work}; why {_OFFSETS}")


def _label_windows(call: OpCall, shards: Shards) -> tuple[dict[str, Range], set[str]]:
    """Return the window (range that the rank holds) of each label, and the labels that are cut."""
    windows: dict[str, Range] = {}
    cut: set[str] = set()
    types = (*call.inputs[:2], *call.outputs)
    for names, entry, bounds in zip(
        _operand_labels(call), types, (*shards.inputs[:2], *shards.outputs), strict=True
    ):
        for name, extent, window in zip(names, entry.shape, bounds, strict=True):
            # A label that is summed over is cut in both operands.
            windows[name] = window
            cut |= {name} if is_cut(window, extent) else set()
    return windows, cut


def _paddings(call: OpCall, windows: Mapping[str, Range], cut: set[str]) -> dict[str, int]:
    """Return how many elements to append along each label so that rows are aligned.

    Tensors may have either order of dims in memory, so labels that are cut are always aligned.
    """
    multiple = max(_ALIGNMENT_BYTES // ITEMSIZE[call.inputs[0].dtype], 1)
    left, right, _ = _operand_labels(call)
    lacking = {name: -length(windows[name]) % multiple for name in {left[-1], right[-1]} | cut}
    return {name: count for name, count in lacking.items() if count and name != "e"}


class _ExpertTokens:
    """Rotates tokens so that the tokens of a window of the experts come first, and back.

    The kernel takes offsets from token 0 on. Tokens are sorted by expert, so the tokens of a window
    are contiguous, and a rotation needs no extents that depend on data, as a slice would:

        tokens, by expert         a a b b b c d d      window b, c; offsets 2 5 6 8
        rotated by offset of a    b b b c d d a a      local offsets 3 4
        result of the kernel      B B B C x x x x      x: unspecified
        zeros, rotated back       0 0 B B B C 0 0

    Args:
        builder: Collects the calls.
        offsets: Ends of the tokens of each expert; all experts.
        experts: The window.
        num_tokens: Number of tokens, at least one.
    """

    def __init__(
        self, builder: LocalProgramBuilder, offsets: Ref, experts: Range, num_tokens: int
    ) -> None:
        self._builder = builder
        self._num_tokens = num_tokens
        self._first: Ref | None = None
        ends = builder("aten.slice.Tensor", offsets, 0, *experts)
        if experts[0]:
            self._first = builder("aten.select.int", offsets, 0, experts[0] - 1)
            ends = builder("aten.sub.Tensor", ends, self._first)
        self.offsets = ends
        ones = builder("aten.new_ones.default", offsets, (num_tokens,))
        counted = builder("aten.cumsum.default", ones, 0)
        self._positions = builder("aten.sub.Tensor", counted, 1)

    def to_front(self, tensor: Ref, dim: int) -> Ref:
        """Rotate the tokens so that the tokens of the window's experts come first."""
        return self._rotate(tensor, dim, "aten.add.Tensor")

    def to_original_order(self, tensor: Ref, dim: int, num_dims: int) -> Ref:
        """Set the results for other experts' tokens to zero, and rotate back."""
        builder = self._builder
        last = builder("aten.select.int", self.offsets, 0, -1)
        beyond = builder("aten.ge.Tensor", self._positions, last)
        for _ in range(num_dims - 1 - dim):
            beyond = builder("aten.unsqueeze.default", beyond, -1)
        tensor = builder("aten.masked_fill.Scalar", tensor, beyond, 0)
        return self._rotate(tensor, dim, "aten.sub.Tensor")

    def _rotate(self, tensor: Ref, dim: int, step: str) -> Ref:
        if self._first is None:
            return tensor
        source = self._builder(step, self._positions, self._first)
        source = self._builder("aten.remainder.Scalar", source, self._num_tokens)
        return self._builder("aten.index_select.default", tensor, dim, source)


def _padded(
    builder: LocalProgramBuilder, tensor: Ref, names: str, paddings: Mapping[str, int]
) -> Ref:
    """Append zeros to a tensor until its rows are aligned."""
    amounts = [amount for name in reversed(names) for amount in (0, paddings.get(name, 0))]
    return (
        builder("aten.constant_pad_nd.default", tensor, tuple(amounts), 0)
        if any(amounts)
        else tensor
    )


def _localize_product(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Make offsets count local tokens, rotate local experts' tokens to the front, align rows."""
    (left, right, offsets, *rest), named = given(call, ("self", "mat2", "offs"))
    forms = _operand_labels(call)
    windows, cut = _label_windows(call, shards)
    if not all(map(length, windows.values())):
        return only_zeros(left, shards.output_shape())
    paddings = _paddings(call, windows, cut)
    if (offsets is None and not paddings) or (not paddings and not cut & {"t", "e"}):
        return run_as_is(call)
    builder = LocalProgramBuilder()
    operands = [left, right]
    experts: _ExpertTokens | None = None
    if offsets is not None and "t" in cut:
        offsets = _local_offsets(builder, offsets, windows["t"])
    if offsets is not None and "e" in cut:
        experts = _ExpertTokens(builder, offsets, windows["e"], length(windows["t"]))
        offsets = experts.offsets
        operands = [
            experts.to_front(operand, names.index("t")) if "t" in names else operand
            for operand, names in zip(operands, forms, strict=False)
        ]
    operands = [
        _padded(builder, operand, names, paddings)
        for operand, names in zip(operands, forms, strict=False)
    ]
    made = builder(call.op, *operands, offsets, *rest, **named)
    for dim, name in enumerate(forms[2]):
        if name in paddings:
            made = builder("aten.slice.Tensor", made, dim, 0, length(windows[name]))
    if experts is not None and "t" in forms[2]:
        made = experts.to_original_order(made, forms[2].index("t"), len(forms[2]))
    return builder.program(made)


def _gradients(call: OpCall) -> Notation:
    """Return the notation of a call (tokens, weights, offsets, gradient) -> both gradients."""
    work = 4.0 * prod(call.inputs[0].shape) * call.inputs[1].shape[2]
    clauses = f"linear 3; linear 0 to 1; linear 1 to 0; linear 0 1; flop {work}; why {_OFFSETS}"
    return notation(call, f"t+ d+, e+ d f+, o!, t f => t d, e d f; {clauses}")


def _localize_gradients(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Make offsets count local tokens, and rotate local experts' tokens to the front."""
    tokens, weights, offsets, gradient = call.args
    assert isinstance(tokens, Ref) and isinstance(offsets, Ref) and isinstance(gradient, Ref)
    window, (experts, *_) = shards.inputs[0][0], shards.inputs[1]
    is_cut_t = is_cut(window, call.inputs[0].shape[0])
    is_cut_e = is_cut(experts, call.inputs[1].shape[0])
    if not is_cut_t and not is_cut_e:
        return run_as_is(call)
    builder = LocalProgramBuilder()
    if is_cut_t:
        offsets = _local_offsets(builder, offsets, window)
    if not is_cut_e:
        return builder.program(*builder.several(2, call.op, tokens, weights, offsets, gradient))
    expert_tokens = _ExpertTokens(builder, offsets, experts, length(window))
    tokens, gradient = (expert_tokens.to_front(operand, 0) for operand in (tokens, gradient))
    token_gradient, weight_gradient = builder.several(
        2, call.op, tokens, weights, expert_tokens.offsets, gradient
    )
    return builder.program(expert_tokens.to_original_order(token_gradient, 0, 2), weight_gradient)


def _local_offsets(builder: LocalProgramBuilder, offsets: Ref, tokens: Range) -> Ref:
    """Return the offsets of the tokens in a window, counted from its start.

    Clamping leaves no tokens for experts whose tokens are all before or all after the window.
    """
    offsets = builder("aten.sub.Tensor", offsets, tokens[0])
    return builder("aten.clamp.default", offsets, 0, length(tokens))


#: Rule of any operator with arguments (operand, operand, offsets), such as `_grouped_mm`.
PRODUCT = Rule(_notation, _localize_product)

#: Rule of any operator (tokens, weights, offsets, gradient) -> both gradients.
GRADIENTS = Rule(_gradients, _localize_gradients)

RULES = {"aten._grouped_mm.default": PRODUCT}
