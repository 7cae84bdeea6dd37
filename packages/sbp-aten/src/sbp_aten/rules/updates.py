"""What happens where values are written to a tensor: they replace, are added, are compared.

Holds no rules; `scatter` and `index_put` say where values are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbp_core.graph import TensorType
from sbp_core.signatures import Dependence, increasing, linear, maxima, minima

#: Other names of kinds of update.
_NAMES = {"add": "sum", "multiply": "prod"}

#: For booleans: the sum is "or", the product is "and".
_OF_BOOLS = {"sum": "amax", "prod": "amin"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """How values that are written meet what is there, and each other.

    Args:
        dependences: Of the result on what is written to, and on the values.
        reductions: How the labels of updates are reduced away.
        beside: These labels, with the tensor that is written to: it is met once.
        whole: Those of these labels that are needed whole.
        why: Why.
    """

    dependences: tuple[Dependence, ...]
    reductions: tuple[tuple[str, str], ...] = ()
    beside: tuple[tuple[str, int], ...] = ()
    whole: frozenset[str] = frozenset()
    why: str = ""


def choosing(*inputs: int, zero: bool = False) -> tuple[Dependence, ...]:
    """Return the dependences of a result each of whose elements is one of its inputs' or a number.

    Args:
        *inputs: Positions of one input, or of two.
        zero: Whether that number is zero. If there are two inputs there is none.
    """
    alone = tuple(map(increasing, inputs))
    if len(inputs) == 1:
        return (linear(*inputs), *alone) if zero else alone
    return (linear(*inputs), *alone, increasing(*inputs))


def replacing(
    target: TensorType, values: int | None, over: Sequence[str], number: object = None
) -> Updates:
    """Return what happens if values replace what is there.

    Each element of the result is one element: of the tensor, which is argument 0, or of the values.

    Args:
        target: The tensor that is written to, argument 0.
        values: Their position among the tensor arguments; None if they are one number.
        over: Labels of the updates.
        number: That number.
    """
    dependences = choosing(0, *(() if values is None else (values,)), zero=number == 0)
    if values is None and target.dtype == "bool":
        # Truth that is written is "or", falsehood is "and".
        reduction = "max" if number else "min"
        return Updates(
            dependences=dependences,
            reductions=tuple((label, reduction) for label in over),
            beside=tuple((label, 0) for label in over),
        )
    return Updates(
        dependences=dependences,
        whole=frozenset(over),
        why="of several updates of one place the last one counts",
    )


def combining(
    kind: str, target: TensorType, values: int, over: Sequence[str], *, starts: bool = True
) -> Updates:
    """Return what happens if values meet what is there in a sum, product, mean, max or min.

    Args:
        kind: `sum`, `add`, `prod`, `multiply`, `mean`, `amax` or `amin`.
        target: The tensor that is written to, argument 0.
        values: Position of the values among the tensor arguments.
        over: Labels of the updates.
        starts: Whether what is there takes part; else it is replaced where anything is written.
    """
    kind = _NAMES.get(kind, kind)
    if target.dtype == "bool":
        kind = _OF_BOOLS.get(kind, kind)
    unwritten = "" if starts else "a part of the updates does not tell which places are replaced"
    if kind in ("amax", "amin"):
        extreme, reduction = (maxima, "max") if kind == "amax" else (minima, "min")
        return Updates(
            dependences=(increasing(0), extreme(values), extreme(0, values)),
            reductions=tuple((label, reduction) for label in over),
            beside=tuple((label, 0) for label in over),
            whole=frozenset(over if unwritten else ()),
            why=unwritten,
        )
    if kind == "sum":
        return Updates(
            dependences=(linear(0, values), increasing(0)),
            beside=tuple((label, 0) for label in over),
            whole=frozenset(over if unwritten else ()),
            why=unwritten,
        )
    if kind == "mean":
        exact = target.dtype.startswith(("float", "bfloat", "complex"))
        return Updates(
            dependences=(linear(0, values), increasing(0)) if exact else (increasing(0),),
            whole=frozenset(over),
            why="the mean of a place is taken over all of its updates",
        )
    return Updates(
        dependences=(linear(0),) if starts else (increasing(0),),
        whole=frozenset(over),
        why="a product has no partial value",
    )


def meeting_number(kind: str, target: TensorType, over: Sequence[str], number: object) -> Updates:
    """Return what happens if one number is added to what is there (`add`), or is a factor of it.

    See `combining` for the arguments.
    """
    grows = (
        kind == "add" or target.dtype == "bool" or (isinstance(number, int | float) and number >= 0)
    )
    affine = kind == "add" and number != 0
    return Updates(
        dependences=(*(() if affine else (linear(0),)), *((increasing(0),) if grows else ())),
        whole=frozenset(over),
        why="what is there meets the number as often as its place is named",
    )
