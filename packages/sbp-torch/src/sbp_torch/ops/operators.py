"""Find the function that executes an operator of a graph or plan by name (`aten.mm.default`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from sbp_core.compile import is_in_place, written_arguments
from sbp_core.errors import GraphError, SbpValueError
from sbp_core.graph import Argument, Ref, Symbol
from sbp_core.runtime import Number
from sbp_core.signatures import installed_rules
from sbp_torch._torch_compat import OpOverload, argument_types, is_mutable, return_types
from sbp_torch.ops import arithmetic as _arithmetic  # noqa: F401 - registers sbp.constant, ...
from sbp_torch.ops import random as _random_ops  # noqa: F401 - registers sbp.random_*
from sbp_torch.ops import row_updates  # registers sbp.unique_rows, ...
from sbp_torch.ops.fused_updates import IN_PLACE  # registers sbp.fused_*
from sbp_torch.ops.host_copies import HOST_COPIES

#: Most bits of an integer result; larger ones become floats. The largest float has about as many.
_LONG = 1024


def _power(base: Number, exponent: Number) -> Number:
    """Return a real power; a power of integers, too, stays within the range of floats.

    Raises:
        ValueError: a negative number to a fractional power.
        ArithmeticError: zero to a negative power, or a power beyond the range of floats.
    """
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and int(base).bit_length() * abs(exponent) > _LONG:
        base = float(base)
    found: Number | complex = base**exponent
    if isinstance(found, complex):
        raise ValueError(f"math domain error: {base} ** {exponent} is no real number")
    return found


def _product(one: Number, other: Number) -> Number:
    """Return a product; a product of integers, too, stays within the range of floats."""
    is_whole = isinstance(one, int) and isinstance(other, int)
    if is_whole and int(one).bit_length() + int(other).bit_length() > _LONG:
        one = float(one)
    return one * other


_HOST: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": _product,
    "truediv": operator.truediv,
    "pow": _power,
    "neg": operator.neg,
    "floor": math.floor,
    "float": float,
    "mod": operator.mod,
    "abs": abs,
    "sqrt": math.sqrt,
    "min": min,
    "max": max,
    "item": operator.methodcaller("item"),
}


def _after(x: Any, _: Any) -> Any:
    """Return the first argument: `sbp.after(x, token)` is x, computed after the token."""
    return x


def _piece(x: Any, _: Any, dim: int, index: int, count: int, settled: bool) -> Any:
    """Return every `count`-th element along a dim, from `index` on."""
    return torch.slice_copy(x, dim, index, x.shape[dim], count)


def _row_update(*args: Any) -> Any:
    """Return the new table and states of an update by rows; see `row_updates`."""
    return row_updates.row_update(operator_of, *args)


#: Our operators that are not registered with torch; their rules give the call on a shard.
_OWN: dict[str, Callable[..., Any]] = {
    "sbp.after": _after,
    "sbp.piece": _piece,
    "sbp.row_update": _row_update,
    **IN_PLACE,
    **row_updates.IN_PLACE,
    **HOST_COPIES,
}


#: The type of `torch.ops.aten.add`, which names no overload.
_Packet = type(torch.ops.aten.add)

_TENSORS = ("Tensor", "List[Tensor]", "List[Optional[Tensor]]")
_NUMBERS = ("int", "float", "bool", "number", "complex", "Device", "str")

#: Types of the arguments of operators that a graph may call, and of their results.
_TAKEN = frozenset(
    text
    for kind in (*_TENSORS, *_NUMBERS, *(f"List[{number}]" for number in _NUMBERS), "Generator")
    for text in (kind, f"Optional[{kind}]")
)
_MADE = frozenset(_TENSORS)


_SYMBOLS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


@cache
def operator_of(op: str) -> Callable[..., Any]:
    """Return the callable of an operator name.

    `aten.*` and custom namespaces come from `torch.ops`; `host.*` are Python's operators on
    numbers. Graphs and plans may come from files, so they can call nothing else: see
    `why_not_callable`.

    Raises:
        GraphError: torch has no such operator, or a graph may not call it.
    """
    namespace, name, *overload = op.split(".") if "." in op else (op, "")
    if namespace == "host" and name in _HOST:
        return _HOST[name]
    if op in _OWN:
        return _OWN[op]
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        found: Any = getattr(packet, overload[0]) if overload else packet
    except AttributeError:
        found = None
    # `torch.ops` has functions of its own next to operators.
    if len(overload) > 1 or not isinstance(found, OpOverload | _Packet):
        raise GraphError(
            f"no operator is called {op!r} here",
            accepted=f"operators of torch {torch.__version__} and of torch.library",
            todo="import the package that registers it",
        )
    if not isinstance(found, OpOverload):
        overloads = found.overloads()  # type: ignore[no-untyped-call] # torch leaves it untyped
        if len(overloads) != 1:
            raise GraphError(
                f"{op!r} names no overload", accepted=", ".join(f"{op}.{one}" for one in overloads)
            )
        found = getattr(found, overloads[0])
    if why := why_not_callable(op, found):
        raise GraphError(
            f"{op!r} may not be called by a graph or a plan: {why}",
            accepted="operators that make tensors of tensors and numbers, and do nothing else",
            todo="" if op.startswith("aten.") else "register one that does, with torch.library",
        )
    made: Callable[..., Any] = found
    return made


def why_not_callable(op: str, found: OpOverload) -> str:
    """Return why graphs and plans may not call an operator of torch; an empty text if they may.

    They may call operators that have a rule or are pointwise, and the in-place forms of these. Any
    other operator must have a functional schema: it takes tensors and numbers and returns tensors,
    so it can neither read a file nor reach another process.
    """
    if is_in_place(op):
        return "" if written_arguments(op, 1) else "it writes over its arguments"
    if op in installed_rules().ops:
        return ""
    if is_mutable(found):
        return "it writes over its arguments"
    takes, makes = argument_types(found).values(), return_types(found)
    if strange := sorted({kind for kind in takes if kind not in _TAKEN}):
        return f"it takes {strange[0]}"
    if not makes or not _MADE.issuperset(makes):
        return f"it makes {', '.join(makes) or 'nothing'}"
    if "str" in takes and not any("Tensor" in kind for kind in takes):
        return "it takes a text and no tensor"  # such as the name of a file
    if torch.Tag.pointwise in found.tags or not op.startswith("aten."):
        return ""
    # Some of these rely on checks by their callers, and crash without them.
    is_private = op.startswith("aten._") or "unsafe" in op
    return "it is private to PyTorch, and has no rule" if is_private else ""


def results_of(made: Any) -> tuple[Any, ...]:
    """Return the results of an operator as a flat tuple, without omitted results (`None`).

    An operator that returns nothing has the one result `None`.
    """
    if not isinstance(made, tuple | list):
        return (made,)
    return tuple(part for entry in made if entry is not None for part in results_of(entry))


def call(
    op: str, args: Argument, kwargs: Mapping[str, Argument], read: Callable[[str], Any]
) -> tuple[Any, ...]:
    """Return the results of an operator, given the values of names; see `results_of`."""
    named = {key: bind(value, read) for key, value in kwargs.items()}
    return results_of(operator_of(op)(*bind(args, read), **named))


def asked_for(
    target: object, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Any]
) -> list[Any]:
    """Return the results of an operator, with `None` where its output mask is false.

    On fake tensors PyTorch makes some of the masked results, too.
    """
    names = list(argument_types(target)) if isinstance(target, OpOverload) else []
    if "output_mask" not in names:
        return list(made)
    at = names.index("output_mask")
    mask = args[at] if at < len(args) else kwargs["output_mask"]
    return [part if wanted else None for part, wanted in zip(made, mask, strict=True)]


def makes_one_tensor(op: str) -> bool:
    """Whether a call returns a single tensor (or host number), not a tuple or list."""
    found = operator_of(op)
    return op not in IN_PLACE and (
        not isinstance(found, OpOverload) or return_types(found) == ["Tensor"]
    )


def symbol_value(symbol: Symbol) -> Any:
    """Return the torch object a `Symbol` names.

    Raises:
        SbpValueError: torch has no object of this kind and name.
    """
    if symbol.kind == "device":
        return torch.device(symbol.name)
    found = getattr(torch, symbol.name, None)
    kind = _SYMBOLS.get(symbol.kind)
    if kind is None or not isinstance(found, kind):
        raise SbpValueError(
            f"torch has no {symbol.kind} {symbol.name!r}", accepted="device, " + ", ".join(_SYMBOLS)
        )
    return found


def freeze(argument: Argument, of: Callable[[str], Hashable]) -> Hashable:
    """Return an argument as a hashable key, with `of(name)` for each `Ref`.

    Numbers keep their type: 1, 1.0 and True are equal, but promote dtypes differently.
    """
    if isinstance(argument, Ref):
        return of(argument.name)
    if isinstance(argument, tuple | list):
        return tuple(freeze(part, of) for part in argument)
    return argument if isinstance(argument, Symbol) else (type(argument), repr(argument))


def bind(argument: Argument, read: Callable[[str], Any]) -> Any:
    """Return an argument with symbols resolved and each `Ref` replaced by `read(name)`."""
    if isinstance(argument, Ref):
        return read(argument.name)
    if isinstance(argument, Symbol):
        return symbol_value(argument)
    if isinstance(argument, tuple):
        return [bind(part, read) for part in argument]
    return argument
