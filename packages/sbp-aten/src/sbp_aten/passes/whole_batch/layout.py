"""Describe how the parts of micro-batches form a value of the whole batch: `Samples`, `Total`, ...

The pass `whole_batch_loss` finds such a layout for each value. Micro-batches are treated as the
ranks of one more mesh axis, in time. So micro-batches may compute separately whatever ranks may,
and a value of the whole batch consists of parts like a tensor of shards. One difference: parts are
not sent, so samples need not be next to each other.

    layout             SBP     the whole batch of two micro-batches
    `Samples(0)`       S(0)    aaaabbbb: the samples of a, then the samples of b
    `Samples(0, 2)`            aabbaabb: two views of every sample, one view after the other
    `Total("sum")`     P       the sum of both
    `SAME`             B       equal in both
    `SamplePiece(1, 0, 2)`     the second of two pieces of the first micro-batch: see `pieces`

A value of the whole batch is one of these for the micro-batches:

    terms      the sum of c · v: parts v that are samples, totals or the same, and coefficients c,
               products of powers of numbers that are known once a step, such as 1 / D of a number
               of tokens D; terms of equal coefficients and layouts are merged
    late       known once a step, because it depends on totals (`StepConstant`)
    unknown    none of these: samples are combined, or depend on their positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sbp_core.graph import Node, TensorType
from sbp_core.sbp import B, Partial, S, Sbp, Split


@dataclass(frozen=True, slots=True)
class Samples:
    """Layout: the elements of a dim belong to samples.

    Args:
        dim: The dim.
        blocks: Number of blocks of equal length in the dim; each has all samples in their order.
    """

    dim: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Total:
    """Layout: the whole is the elementwise sum, maximum or minimum of the parts."""

    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class Same:
    """Layout: each part is the whole."""


@dataclass(frozen=True, slots=True)
class SamplePiece:
    """Layout: one piece of the samples, such as a single sample.

    Args:
        place: Index of the piece in its micro-batch.
        micro_batch: Index of the micro-batch.
        count: Number of pieces of each micro-batch, all of one size.
        dim: If not None, the value has all samples along that dim, zero except for this piece.
    """

    place: int
    micro_batch: int
    count: int
    dim: int | None = None


SAME = Same()

Layout = Samples | Total | Same | SamplePiece


def sbp_of(layout: Layout) -> Sbp:
    """Return the SBP that corresponds to a layout."""
    if isinstance(layout, Samples):
        return S(layout.dim)
    return Partial(layout.reduction) if isinstance(layout, Total) else B


def layout_of(sbp: Sbp, blocks: int) -> Layout:
    """Return the layout of an SBP; samples are in `blocks` blocks."""
    if isinstance(sbp, Split):
        return Samples(sbp.dim, blocks)
    return Total(sbp.reduction) if isinstance(sbp, Partial) else SAME


def part_type(kind: TensorType, layout: Layout, num_parts: int) -> TensorType:
    """Return the type of one part of a tensor."""
    return TensorType(part_shape(kind.shape, layout, num_parts), kind.dtype)


def part_shape(shape: tuple[int, ...], layout: Layout, num_parts: int) -> tuple[int, ...]:
    """Return the shape of one part of a tensor."""
    if not isinstance(layout, Samples):
        return shape
    at = layout.dim
    return (*shape[:at], shape[at] // num_parts, *shape[at + 1 :])


def divides(shape: tuple[int, ...], layout: Samples, num_parts: int) -> bool:
    """Whether every block divides into equal parts."""
    extent = shape[layout.dim]
    return extent > 0 and extent % (layout.blocks * num_parts) == 0


def reshaped(
    layout: Samples, before: tuple[int, ...], after: tuple[int, ...], num_parts: int
) -> Samples | None:
    """Return the layout of samples in another shape of the same elements in the same order.

    The elements, in order, are blocks of equal length, each cut into parts; at most one dim of the
    new shape has this structure:

        before [2 * B, 6], 2 blocks      after [2, B, 6]: Samples(1)
        elements: 2 blocks of 6 B        after [12 * B]: Samples(0, 2)

    Args:
        layout: Layout in the shape `before`.
        before: Shape of the whole tensor.
        after: The new shape.
        num_parts: Number of micro-batches.

    Returns:
        The layout in the new shape; None if no dim has the parts.
    """
    blocks = prod(before[: layout.dim]) * layout.blocks
    for dim, extent in enumerate(after):
        ahead = prod(after[:dim])
        if ahead == 0 or blocks % ahead:
            continue
        inner = blocks // ahead
        if extent and extent % (inner * num_parts) == 0:
            return Samples(dim, inner)
    return None


# Values

#: Product of powers: (name of a number of the whole batch, exponent); sorted, without zeros.
Coefficient = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PartValue:
    """A value of one micro-batch: its name in the new graph, and its layout in the whole."""

    name: str
    layout: Layout = SAME


@dataclass(frozen=True, slots=True)
class LinearTerm:
    """A coefficient times a part."""

    coefficient: Coefficient
    part: PartValue


#: A value of the whole batch: the sum of one or more terms.
Terms = tuple[LinearTerm, ...]


def plain(part: PartValue) -> Terms:
    """Return a value that is one part without coefficient."""
    return (LinearTerm((), part),)


def times(*factors: Coefficient) -> Coefficient:
    """Return a product of coefficients."""
    found: dict[str, int] = {}
    for factor in factors:
        for name, power in factor:
            found[name] = found.get(name, 0) + power
    return tuple(sorted((name, power) for name, power in found.items() if power))


def inverse(coefficient: Coefficient) -> Coefficient:
    """Return one divided by a coefficient."""
    return tuple((name, -power) for name, power in coefficient)


@dataclass(frozen=True, slots=True)
class StepConstant:
    """A value that is known once a step, under its own name."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that micro-batches cannot provide: the reason, and the node where that begins."""

    why: str
    node: Node


LATE = StepConstant()

Value = Terms | StepConstant | Unknown


def single_part(value: Value) -> PartValue | None:
    """Return the part of a value that is one term without coefficient."""
    if not isinstance(value, tuple) or len(value) != 1 or value[0].coefficient:
        return None
    return value[0].part


def is_total(value: Value) -> bool:
    """Whether a value of the whole batch is known once a step."""
    return isinstance(value, tuple) and not has_samples(value)


def has_totals(terms: Terms) -> bool:
    """Whether a term of a value has to be added up over the micro-batches."""
    return any(isinstance(term.part.layout, Total) for term in terms)


def has_samples(value: Value) -> bool:
    """Whether a value has elements of single samples."""
    return isinstance(value, tuple) and any(
        isinstance(term.part.layout, Samples | SamplePiece) for term in value
    )


def has_pieces(value: Value) -> bool:
    """Whether a value has single pieces of the samples."""
    return isinstance(value, tuple) and any(
        isinstance(term.part.layout, SamplePiece) for term in value
    )


def multiplied(made: Sequence[Terms], factor: Coefficient) -> list[Terms]:
    """Return values multiplied by a factor."""
    if not factor:
        return list(made)
    return [
        tuple(LinearTerm(times(term.coefficient, factor), term.part) for term in terms)
        for terms in made
    ]
