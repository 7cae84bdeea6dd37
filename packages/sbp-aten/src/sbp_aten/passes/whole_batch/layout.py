"""How the parts of micro-batches make a value of the whole batch.

Micro-batches are like the ranks of one more mesh axis, in time. Whatever ranks may compute
separately, micro-batches may, too, and their parts make a value of the whole batch as shards make a
tensor. There is one more freedom: these parts are not sent, so samples need not be next to each
other.

    layout             SBP     the whole batch of two micro-batches
    `Samples(0)`       S(0)    aaaabbbb: the samples of one, and then those of the other
    `Samples(0, 2)`            aabbaabb: two views of every sample, one view after the other
    `Total("sum")`     P       the sum of both
    `SAME`             B       the value of either
    `SamplePiece(1, 0, 2)`     the second of two pieces of the first micro-batch: see `pieces`

A value of the whole batch has one of these relations to its micro-batches:

    terms      the sum of c · v: parts v that are samples, totals or the same, and coefficients c,
               products of powers of numbers that are known once a step, such as 1 / D for a number
               of tokens D; terms of equal coefficients and layouts are merged
    late       computed from totals: known once a step
    unknown    none of these: samples are combined, or differ by their places
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sbp_core.graph import Node, TensorType
from sbp_core.sbp import B, Partial, S, Sbp, Split


@dataclass(frozen=True, slots=True)
class Samples:
    """The elements of a dim belong to samples.

    Args:
        dim: The dim.
        blocks: So many blocks of equal length make the dim; each has all samples in their order.
    """

    dim: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Total:
    """The whole is the elementwise sum, maximum or minimum of the parts."""

    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class Same:
    """Each part is the whole."""


@dataclass(frozen=True, slots=True)
class SamplePiece:
    """One piece of the samples, such as a single one.

    Args:
        place: Index of the piece in its micro-batch.
        micro_batch: Index of the micro-batch.
        count: Pieces of each micro-batch, all of one size.
        dim: If not None, the value has all samples along that dim, zero but for this piece.
    """

    place: int
    micro_batch: int
    count: int
    dim: int | None = None


SAME = Same()

Layout = Samples | Total | Same | SamplePiece


def sbp_of(layout: Layout) -> Sbp:
    """Return the SBP of a layout on a mesh axis of micro-batches."""
    if isinstance(layout, Samples):
        return S(layout.dim)
    return Partial(layout.reduction) if isinstance(layout, Total) else B


def layout_of(sbp: Sbp, blocks: int) -> Layout:
    """Return the layout of an operator's result, given an SBP and the blocks of its samples."""
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

    In memory order the elements are so many blocks of equal length, each cut into parts; there is
    at most one dim of the other shape along which this holds:

        before [2 * B, 6], 2 blocks      after [2, B, 6]: Samples(1)
        elements: 2 blocks of 6 B        after [12 * B]: Samples(0, 2)

    Args:
        layout: The layout in the shape `before`.
        before: Shape of the whole tensor.
        after: The other shape.
        num_parts: Number of micro-batches.

    Returns:
        The layout in the shape `after`; None if the parts are not parts of one dim there.
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

#: Numbers of the whole batch, by name, with their powers; sorted, without zeros.
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


#: A value of the whole batch as a sum of terms, at least one.
Terms = tuple[LinearTerm, ...]


def plain(part: PartValue) -> Terms:
    """Return a value that is made of parts alone."""
    return (LinearTerm((), part),)


def times(*factors: Coefficient) -> Coefficient:
    """Return a product."""
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
    """A value that does not follow from micro-batches: why, and the node where that begins."""

    why: str
    node: Node


LATE = StepConstant()

Value = Terms | StepConstant | Unknown


def single_part(value: Value) -> PartValue | None:
    """Return the part of a value that is one term without coefficient; None for others."""
    if not isinstance(value, tuple) or len(value) != 1 or value[0].coefficient:
        return None
    return value[0].part


def is_total(value: Value) -> bool:
    """Whether a value of the whole batch is known once a step."""
    return isinstance(value, tuple) and not has_samples(value)


def has_totals(terms: Terms) -> bool:
    """Whether a part of a value is to be accumulated over the micro-batches."""
    return any(isinstance(term.part.layout, Total) for term in terms)


def has_samples(value: Value) -> bool:
    """Whether a value has elements of single samples."""
    return isinstance(value, tuple) and any(
        isinstance(term.part.layout, Samples | SamplePiece) for term in value
    )


def has_pieces(value: Value) -> bool:
    """Whether a value is of single pieces of the samples."""
    return isinstance(value, tuple) and any(
        isinstance(term.part.layout, SamplePiece) for term in value
    )


def multiplied(made: Sequence[Terms], factor: Coefficient) -> list[Terms]:
    """Return values times a factor."""
    if not factor:
        return list(made)
    return [
        tuple(LinearTerm(times(term.coefficient, factor), term.part) for term in terms)
        for terms in made
    ]
