"""The common part of operators that only arrange elements: `reshape`, `rearrange`, ...

Each element of an output is an element of an argument, or zero. So all these operators are jointly
linear in their arguments, and jointly increasing.
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


def arranged(
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
        why: Why they may not be split.
        gathered: Labels that the outputs lack because they have elements of only one index of that
            dim. Ranks with other indices have zeros: partial sums, or partial maxima of bools.
        copies: Whether elements move in memory; not needed for operators with copy in their name.
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


def permuted(
    order: Callable[[OpCall, int], Sequence[int]],
    moved: Callable[[OpCall, int], Sequence[int]] = lambda *_: (),
    why: str = "",
    *,
    copies: bool = False,
    localize: Localizer | None = None,
) -> Rule:
    """Return the rule of an operator that permutes the dims of a tensor.

    Args:
        order: Returns, for the call and the number of dims, the argument's dim for each dim of the
            output.
        moved: Returns dims whose elements change places; those of several elements are whole.
        why: Why they are whole.
        copies: Whether elements move in memory.
        localize: How arguments change on a shard.
    """

    def meaning(call: OpCall) -> Notation:
        shape = call.inputs[0].shape
        dims = fresh_dims(len(shape))
        whole = [dims[dim][0] for dim in moved(call, len(shape)) if shape[dim] > 1]
        output = [dims[dim] for dim in order(call, len(shape))]
        return arranged(call, [dims], [output], whole=whole, why=why * bool(whole), copies=copies)

    return Rule(meaning, localize)


def in_order(_: OpCall, num_dims: int) -> Sequence[int]:
    """Return the dims in unchanged order."""
    return range(num_dims)


def fitted(
    builder: LocalProgramBuilder, x: Ref, dim: int, shape: Sequence[int], held: Range, wanted: Range
) -> Ref:
    """Return the elements in range `wanted` of a dim, given a tensor with those in range `held`.

    Elements outside of `held` are zero.

    Args:
        builder: Builder of the program.
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
