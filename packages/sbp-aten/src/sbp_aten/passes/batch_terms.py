"""Values of the whole batch as sums of terms: a coefficient that is known once a step, and parts.

A coefficient is a product of powers of numbers of the whole batch, such as 1 / D of a number of
tokens D. Terms of equal coefficients are added where they meet; others stay apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sbp_aten.passes.batch_calls import Part
from sbp_core.errors import SignatureError
from sbp_core.graph import LogicalGraph, Node
from sbp_core.sbp import B, P
from sbp_core.signatures import OpCall, derivation

#: Numbers of the whole batch, by name, with their powers; sorted, without zeros.
Coefficient = tuple[tuple[str, int], ...]

_SUM = P("sum")


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


def power_of(node: Node) -> int | None:
    """Return the exponent of a node that raises a tensor to a whole power > 0; else None."""
    if node.op != "aten.pow.Tensor_Scalar":
        return None
    exponent = node.args[1]
    return int(exponent) if exponent > 0 and exponent == int(exponent) else None


def linear_in(graph: LogicalGraph, node: Node, given: Iterable[int]) -> list[frozenset[int]]:
    """Return the sets of tensor arguments that hold the given ones and in which a node is linear.

    The smallest come first. Arguments outside of a set are constants of the linear map.
    """
    wanted = frozenset(given)
    found = set()
    try:
        legal = derivation(OpCall.of(graph, node)).legal
    except SignatureError:
        return []
    for signature in legal:
        parts = frozenset(index for index, sbp in enumerate(signature.inputs) if sbp == _SUM)
        others = [sbp for index, sbp in enumerate(signature.inputs) if index not in parts]
        linear = all(sbp == _SUM for sbp in signature.outputs) and all(s == B for s in others)
        if linear and wanted <= parts:
            found.add(parts)
    return sorted(found, key=lambda parts: (len(parts), sorted(parts)))


def is_linear(graph: LogicalGraph, node: Node, given: Iterable[int]) -> bool:
    """Whether a node is linear in just these tensor arguments."""
    wanted = frozenset(given)
    return wanted in linear_in(graph, node, wanted)
