"""What a value of the whole batch is to its micro-batches.

`same`       of states and numbers alone: the same in every micro-batch
terms        the sum of c · v: parts v that are samples, totals or the same, and coefficients c,
products of powers of numbers that are known once a step, such as 1 / D of a number
of tokens D; terms of equal coefficients and layouts are one
late         of totals: known once a step
unknown      nothing of that: samples meet each other, or are told apart by their places
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbp_aten.passes.whole_batch.layout import SAME, Layout, Piece, Samples, Total
from sbp_core.graph import Node

#: Numbers of the whole batch, by name, with their powers; sorted, without zeros.
Coefficient = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A value of one micro-batch: its name in the graph that is written, and what it is part of."""

    name: str
    layout: Layout = SAME


@dataclass(frozen=True, slots=True)
class Term:
    """A coefficient times a part."""

    coefficient: Coefficient
    part: Part


#: A value of the whole batch: the sum of these, at least one.
Terms = tuple[Term, ...]


def plain(part: Part) -> Terms:
    """Return a value that is made of parts alone."""
    return (Term((), part),)


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
class Late:
    """Known once a step, under its own name."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Not to be had of micro-batches: why, and the node where that begins."""

    why: str
    node: Node


LATE = Late()

Value = Terms | Late | Unknown


def single_part(value: Value) -> Part | None:
    """Return the part of a value that is one term without coefficient."""
    if not isinstance(value, tuple) or len(value) != 1 or value[0].coefficient:
        return None
    return value[0].part


def is_total(value: Value) -> bool:
    """Whether a value of the whole batch is known once a step."""
    return isinstance(value, tuple) and not has_samples(value)


def has_totals(terms: Terms) -> bool:
    """Whether a part of a value is to be added up over the micro-batches."""
    return any(isinstance(term.part.layout, Total) for term in terms)


def has_samples(value: Value) -> bool:
    """Whether a value has elements of single samples."""
    return isinstance(value, tuple) and any(
        isinstance(term.part.layout, Samples | Piece) for term in value
    )


def has_pieces(value: Value) -> bool:
    """Whether a value is of single pieces of the samples."""
    return isinstance(value, tuple) and any(isinstance(term.part.layout, Piece) for term in value)


def multiplied(made: Sequence[Terms], factor: Coefficient) -> list[Terms]:
    """Return values times a factor."""
    if not factor:
        return list(made)
    return [
        tuple(Term(times(term.coefficient, factor), term.part) for term in terms) for terms in made
    ]
