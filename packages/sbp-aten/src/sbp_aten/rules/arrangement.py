"""Helpers for sharding rules of operators that only move elements: reshape, permute, select, ...

The rules in `rearrange`, `reshape` and `selection` use them. Every output element is a copy of an
input element, or zero. So each operator is linear, and monotonically increasing, in all arguments
together. This lets partial sums and partial maxima pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sbp_core.graph import Ref
from sbp_core.signatures import (
    Dim,
    Localizer,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Range,
    Rule,
    fresh_dims,
    increasing,
    linear,
)


def movement_notation(
    call: OpCall,
    inputs: Sequence[Iterable[Dim]],
    outputs: Sequence[Iterable[Dim]],
    *,
    whole: Iterable[str] = (),
    why: str = "",
    gathered: Sequence[str] = (),
    copies: bool = False,
) -> Notation:
    """Return the notation of an operator that only moves the elements of its arguments.

    Args:
        call: The call.
        inputs: Dims of each argument.
        outputs: Dims of each output.
        whole: Labels of dims that must not be split.
        why: The reason, for messages.
        gathered: Labels of dims that outputs lack because they take the elements at one index of
            the dim (as `select` does). Ranks without this index return zeros: the results are
            partial sums, or partial maxima for bools.
        copies: Whether it copies memory. Not needed for operators with `_copy` in their name.
    """
    everything = range(len(inputs))
    kind = "max" if call.outputs[0].dtype == "bool" else "sum"
    return Notation(
        inputs=tuple(map(tuple, inputs)),
        outputs=tuple(map(tuple, outputs)),
        dependences=(linear(*everything), increasing(*everything)),
        whole=frozenset(whole),
        reductions=tuple((label, kind) for label in gathered if kind != "sum"),
        work_flop=None if copies or "_copy." in call.op else 0.0,
        why=why,
    )


def permute_rule(
    order: Callable[[OpCall, int], Sequence[int]],
    moved: Callable[[OpCall, int], Sequence[int]] = lambda *_: (),
    why: str = "",
    *,
    copies: bool = False,
    localize: Localizer | None = None,
) -> Rule:
    """Return the rule of an operator that permutes the dims of a tensor.

    Args:
        order: From the call and the number of dims, returns the argument's dim for each dim of the
            output.
        moved: Returns the argument's dims whose elements change position. Such a dim must not be
            split if its extent is above 1.
        why: The reason, for messages.
        copies: Whether it copies memory.
        localize: The localiser, which adapts arguments to a shard.
    """

    def meaning(call: OpCall) -> Notation:
        shape = call.inputs[0].shape
        dims = fresh_dims(len(shape))
        whole = [dims[dim][0] for dim in moved(call, len(shape)) if shape[dim] > 1]
        output = [dims[dim] for dim in order(call, len(shape))]
        return movement_notation(
            call, [dims], [output], whole=whole, why=why * bool(whole), copies=copies
        )

    return Rule(meaning, localize)


def in_order(_: OpCall, num_dims: int) -> Sequence[int]:
    """Return the dims in their order."""
    return range(num_dims)


def crop_or_pad(
    builder: LocalProgramBuilder, x: Ref, dim: int, shape: Sequence[int], held: Range, wanted: Range
) -> Ref:
    """Return the range `wanted` of a dim, given a tensor `x` with the range `held`: crop or pad.

    Missing elements are zero.

    Args:
        builder: Collects the calls.
        x: The tensor.
        dim: The dim.
        shape: Shape of the result.
        held: Range of the elements in `x`.
        wanted: Range of the elements in the result, in the same numbering.
    """
    if held == wanted:
        return x
    if max(held[0], wanted[0]) >= min(held[1], wanted[1]):
        return zeros(builder, x, shape)
    behind = [0, 0] * (len(shape) - 1 - dim)
    pad = (*behind, held[0] - wanted[0], wanted[1] - held[1])
    return builder("aten.constant_pad_nd.default", x, pad)


def zeros(builder: LocalProgramBuilder, x: Ref, shape: Sequence[int]) -> Ref:
    """Return zeros of the dtype of `x`."""
    return builder("aten.new_zeros.default", x, tuple(shape))
