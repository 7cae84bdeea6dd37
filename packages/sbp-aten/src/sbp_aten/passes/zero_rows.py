"""Prove which values of an update are unchanged in the rows of a table that have no gradient.

An abstract interpretation of the operators of an update, for one row whose gradient is zero. It
finds three properties of a value there:

    zero        it is 0
    same        it is equal to an input, such as the row of a parameter or of a state
    sign        it is at least 0, or above 0

    gradient                             zero
    total = addcmul(sum, g, g)           same as sum, since g g is zero
    root = sqrt(total)                   at least 0
    bound = add(root, 1e-10)             above 0
    new = addcdiv(p, g, bound)           same as p, since zero / (above 0) is zero

So Adagrad changes no row without a gradient. Momentum does: in `v = mul(v, 0.9)` nothing is known.

Inputs are finite, and states have the values that their optimizer gives them: the root of a sum of
squares is a number. Operators that are not in the table below have no known property.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from sbp_core.graph import ITEMSIZE, Argument, LogicalGraph, Node, Ref

__all__ = ["NOTHING", "ZERO", "RowFact", "Sign", "facts_of"]


class Sign(IntEnum):
    """What is known about the sign of a value: nothing, at least 0, or above 0."""

    UNKNOWN = 0
    AT_LEAST_ZERO = 1
    ABOVE_ZERO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFact:
    """What is known about a value in a row without a gradient.

    Args:
        zero: Whether it is 0.
        same: The input that it is equal to; empty if none is known.
        sign: What is known about its sign.
    """

    zero: bool = False
    same: str = ""
    sign: Sign = Sign.UNKNOWN


NOTHING = RowFact()
ZERO = RowFact(zero=True, sign=Sign.AT_LEAST_ZERO)

#: The smallest number of a dtype that an addend must have to count as above 0.
_LEAST = {"float16": 6e-8, "bfloat16": 1e-38, "float32": 1e-38, "float64": 1e-300}

#: An argument: a fact of a row, a number, or None for a finite number that is not known.
_Known = RowFact | float | None


class _Call:
    """The arguments of a node, as they are known."""

    def __init__(
        self, graph: LogicalGraph, node: Node, read: Callable[[str], RowFact | None]
    ) -> None:
        self.node, self._read = node, read
        self.made = graph.tensor(node.outputs[0])

    def __getitem__(self, index: int) -> _Known:
        args = self.node.args
        return self.known(args[index]) if index < len(args) else None

    def named(self, name: str, default: float) -> _Known:
        """Return an argument that is given by name."""
        return self.known(self.node.kwargs.get(name, default))

    def known(self, argument: Argument) -> _Known:
        """Return what is known of an argument."""
        if isinstance(argument, Ref):
            return self._read(argument.name)
        return float(argument) if isinstance(argument, int | float) else None

    def fact(self, value: _Known) -> RowFact:
        """Return an argument as a fact."""
        if isinstance(value, RowFact):
            return value
        if value is None:
            return NOTHING
        above = value >= _LEAST.get(self.made.dtype, 1.0)
        sign = Sign.ABOVE_ZERO if above else Sign.AT_LEAST_ZERO if value >= 0 else Sign.UNKNOWN
        return RowFact(zero=value == 0, sign=sign)


def _sum(call: _Call, *, turned: bool = False) -> RowFact:
    """`add` and `sub`: an addend of 0 changes nothing."""
    left, right = call.fact(call[0]), call.fact(call[1])
    alpha = call.named("alpha", 1)
    if right.zero or alpha == 0:
        return left
    positive = isinstance(alpha, float) and alpha > 0 and not turned
    if left.zero and positive and alpha == 1:
        return right
    if not positive or Sign.UNKNOWN in (left.sign, right.sign):
        return NOTHING
    # With a factor, an addend above 0 may vanish.
    return RowFact(sign=max(left.sign, right.sign if alpha == 1 else Sign.AT_LEAST_ZERO))


def _product(call: _Call) -> RowFact:
    """`mul`: 0 if a factor is; a product of numbers above 0 may underflow."""
    left, right = call.fact(call[0]), call.fact(call[1])
    if left.zero or right.zero:
        return ZERO
    if call[1] == 1.0:
        return left
    is_known = Sign.UNKNOWN not in (left.sign, right.sign)
    return RowFact(sign=Sign.AT_LEAST_ZERO) if is_known else NOTHING


def _quotient(call: _Call) -> RowFact:
    """`div`: 0 if the dividend is 0, and the divisor is not."""
    left, right = call.fact(call[0]), call.fact(call[1])
    nonzero = right.sign is Sign.ABOVE_ZERO or (isinstance(call[1], float) and call[1] != 0)
    if left.zero and nonzero:
        return ZERO
    if call[1] == 1.0:
        return left
    is_known = nonzero and Sign.UNKNOWN not in (left.sign, right.sign)
    return RowFact(sign=Sign.AT_LEAST_ZERO) if is_known else NOTHING


def _add_product(call: _Call) -> RowFact:
    """`addcmul(x, a, b)`: x if a or b is 0."""
    is_zero = call.fact(call[1]).zero or call.fact(call[2]).zero
    return call.fact(call[0]) if is_zero else NOTHING


def _add_quotient(call: _Call) -> RowFact:
    """`addcdiv(x, a, b)`: x if a is 0, and b is above 0."""
    is_zero = call.fact(call[1]).zero and call.fact(call[2]).sign is Sign.ABOVE_ZERO
    return call.fact(call[0]) if is_zero else NOTHING


def _power(call: _Call) -> RowFact:
    """`pow` to a number above 0: 0 stays 0; a square is at least 0."""
    base, exponent = call.fact(call[0]), call[1]
    if not isinstance(exponent, float) or exponent <= 0:
        return NOTHING
    if base.zero:
        return ZERO
    is_known = exponent % 2 == 0 or base.sign is not Sign.UNKNOWN
    return RowFact(sign=Sign.AT_LEAST_ZERO) if is_known else NOTHING


def _choice(call: _Call) -> RowFact:
    """`where(condition, x, y)`: whatever both are; y if the condition is false."""
    yes, no = call.fact(call[1]), call.fact(call[2])
    if call.fact(call[0]).zero:
        return no
    same = yes.same if yes.same == no.same else ""
    return RowFact(zero=yes.zero and no.zero, same=same, sign=min(yes.sign, no.sign))


def _exceeds(call: _Call) -> RowFact:
    """`gt(x, bound)`: 0 is not above a bound of at least 0; the truth value 0 is false."""
    bound = call[1]
    is_false = call.fact(call[0]).zero and isinstance(bound, float) and bound >= 0
    return ZERO if is_false else NOTHING


def _larger(call: _Call) -> RowFact:
    """`maximum`, `clamp_min`: as large as the larger argument."""
    left, right = call.fact(call[0]), call.fact(call[1])
    return RowFact(zero=left.zero and right.zero, sign=max(left.sign, right.sign))


def _clamp(call: _Call) -> RowFact:
    """`clamp(x, low, high)`: 0 stays 0 between bounds of both signs."""
    low, high = call[1], call[2]
    low_fits = call.node.args[1:2] in ((), (None,)) or (isinstance(low, float) and low <= 0)
    high_fits = call.node.args[2:3] in ((), (None,)) or (isinstance(high, float) and high >= 0)
    fits = low_fits and high_fits and not call.node.kwargs
    return ZERO if fits and call.fact(call[0]).zero else NOTHING


def _blend(call: _Call) -> RowFact:
    """`lerp(x, y, w)`: 0 if both are."""
    return ZERO if call.fact(call[0]).zero and call.fact(call[1]).zero else NOTHING


def _keeps_zero(call: _Call) -> RowFact:
    return ZERO if call.fact(call[0]).zero else NOTHING


def _not_negative(call: _Call) -> RowFact:
    """`sqrt`, `abs`: at least 0."""
    given = call.fact(call[0])
    return ZERO if given.zero else RowFact(sign=max(given.sign, Sign.AT_LEAST_ZERO))


def _of_columns(call: _Call) -> RowFact:
    """`sum`, `mean` of the columns of a row; means may underflow."""
    given = call.fact(call[0])
    return ZERO if given.zero else RowFact(sign=min(given.sign, Sign.AT_LEAST_ZERO))


def _inverse(call: _Call) -> RowFact:
    """`rsqrt`, `reciprocal`: of a number above 0, a number above 0."""
    is_above = call.fact(call[0]).sign is Sign.ABOVE_ZERO
    return RowFact(sign=Sign.ABOVE_ZERO) if is_above else NOTHING


_TRANSFER: Mapping[str, Callable[[_Call], RowFact]] = {
    "abs": _not_negative,
    "add": _sum,
    "addcdiv": _add_quotient,
    "addcmul": _add_product,
    "clamp": _clamp,
    "clamp_min": _larger,
    "div": _quotient,
    "gt": _exceeds,
    "lerp": _blend,
    "maximum": _larger,
    "mean": _of_columns,
    "mul": _product,
    "neg": _keeps_zero,
    "pow": _power,
    "reciprocal": _inverse,
    "rsqrt": _inverse,
    "sgn": _keeps_zero,
    "sign": _keeps_zero,
    "sqrt": _not_negative,
    "sub": lambda call: _sum(call, turned=True),
    "sum": _of_columns,
    "where": _choice,
}


def facts_of(
    graph: LogicalGraph, node: Node, read: Callable[[str], RowFact | None]
) -> tuple[RowFact, ...]:
    """Return what is known of each result of a node in a row without a gradient.

    Args:
        graph: The graph of the node.
        node: An operator that maps rows to rows.
        read: Returns what is known of a value; None of a number, or of a 0-d tensor.
    """
    call = _Call(graph, node, read)
    if node.kind.startswith("fused_"):
        return _fused(call)
    if node.kind in ("_to_copy", "clone"):
        return (_converted(graph, call),)
    transfer = _TRANSFER.get(node.kind)
    # Any other argument by name, such as a rounding mode, may change what the operator computes.
    is_known = node.kwargs.keys() <= {"alpha", "value"}
    found = transfer(call) if transfer is not None and is_known else NOTHING
    if found.same and graph.types[found.same] != graph.types[node.outputs[0]]:
        found = replace(found, same="")  # promoted: equal numbers, but in another dtype
    return (found, *(NOTHING for _ in node.outputs[1:]))


def _converted(graph: LogicalGraph, call: _Call) -> RowFact:
    """Return the fact of a conversion: a wider dtype, and the way back from it, change nothing."""
    given = call.fact(call[0])
    if not call.made.dtype.startswith(("float", "bfloat")):
        return replace(given, same="", sign=Sign.UNKNOWN)
    if given.same:
        own = graph.tensor(given.same).dtype
        wider = ITEMSIZE[call.made.dtype] > ITEMSIZE[own]
        if not (wider or call.made.dtype == own):
            given = replace(given, same="")
    # A small number above 0 may become 0.
    return replace(given, sign=min(given.sign, Sign.AT_LEAST_ZERO))


def _fused(call: _Call) -> tuple[RowFact, ...]:
    """Return the facts of `sbp.fused_*(p, g, states...)` without momentum and weight decay."""
    node = call.node
    count = len(node.outputs)
    of_states = {"fused_sgd": (), "fused_adagrad": (2,)}.get(node.kind)
    settings = node.kwargs
    is_plain = (
        of_states is not None
        and settings.get("weight_decay") == 0
        and settings.get("momentum", 0) == 0
        and call.fact(call[1]).zero
        and (node.kind == "fused_sgd" or call.fact(call.known(settings.get("eps"))).sign == 2)
    )
    if not is_plain or of_states is None or count != 1 + len(of_states):
        return (NOTHING,) * count
    return tuple(call.fact(call[at]) for at in (0, *of_states))
