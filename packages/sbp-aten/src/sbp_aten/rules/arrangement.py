"""What operators that only arrange elements have in common: `reshape`, `views`, `rearrange`, ...

Each element of an output is an element of an argument, or zero. So all are jointly linear in their
arguments, and jointly increasing.
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
    """Return the notation of an operator that arranges the elements of its arguments.

    Args:
        call: The call.
        inputs: Dims of each argument.
        outputs: Dims of each output.
        whole: Labels that may not be split.
        why: Why not.
        gathered: Labels that outputs lack because these have elements of one place of that dim
            only. A rank that holds others has zeros: partial sums, or, of bools, maxima.
        copies: Whether elements move in memory; those whose name says so need not be told.
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
    """Return the rule of an operator that puts the dims of a tensor into another order.

    Args:
        order: From the call and the number of dims: the dim of the argument that is each dim of
            the output.
        moved: Dims of the argument whose elements change places: whole if there are several.
        why: What happens to these.
        copies: Whether elements move in memory.
        localize: How arguments change on a shard.
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
    """Return the elements in range `wanted` of a dim of which `x` has those in range `held`.

    Those that it does not have are zero.

    Args:
        builder: Takes the calls.
        x: The tensor.
        dim: The dim.
        shape: Of the result.
        held: Range of those in `x`.
        wanted: Range of those in the result, counted alike.
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
