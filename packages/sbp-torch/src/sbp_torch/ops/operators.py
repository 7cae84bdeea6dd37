"""From the names of operators in graphs and plans to what executes them on tensors."""

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
from sbp_torch.ops.fused_updates import IN_PLACE  # registers sbp.fused_*
from sbp_torch.ops.host_copies import HOST_COPIES

#: Bits that integers may have before they go on as floats: about as many as the largest float.
_LONG = 1024


def _power(base: Number, exponent: Number) -> Number:
    """Return a power, which is real; of integers, too, one that is no larger than floats are.

    Raises:
        ValueError: a broken power of a number below 0.
        ArithmeticError: a power of 0 below 0, or a power that no float can be.
    """
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and int(base).bit_length() * abs(exponent) > _LONG:
        base = float(base)
    found: Number | complex = base**exponent
    if isinstance(found, complex):
        raise ValueError(f"math domain error: {base} ** {exponent} is no real number")
    return found


def _product(one: Number, other: Number) -> Number:
    """Return a product; of integers, too, one that is no larger than floats are."""
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
    """Return the first argument: `sbp.after(x, token)` is x once the token is there."""
    return x


def _piece(x: Any, _: Any, dim: int, index: int, count: int, settled: bool) -> Any:
    """Return every `count`-th element of a dim, from `index` on."""
    return torch.slice_copy(x, dim, index, x.shape[dim], count)


#: Operators of ours that torch need not know; their rules say what a shard runs instead.
_OWN: dict[str, Callable[..., Any]] = {
    "sbp.after": _after,
    "sbp.piece": _piece,
    **IN_PLACE,
    **HOST_COPIES,
}


#: What `torch.ops.aten.add` is, without its overload.
_Packet = type(torch.ops.aten.add)

_TENSORS = ("Tensor", "List[Tensor]", "List[Optional[Tensor]]")
_NUMBERS = ("int", "float", "bool", "number", "complex", "Device", "str")

#: Types of arguments of what a graph may call, and of results.
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

    `aten.*` and custom namespaces come from `torch.ops`; `host.*` are Python's own on numbers.
    Graphs and plans may come from files, and this is all that they can call: see
    `why_not_callable`.

    Raises:
        GraphError: torch has no such operator, or it is none for a graph.
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
    # `torch.ops` has functions of its own besides operators.
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

    What has a rule or is pointwise may be called, and of what writes over its arguments the forms
    in place of those. Any other one has to be functional, as its schema says: it takes tensors and
    numbers and makes tensors, so that it reads no file and knows no other process.
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
    # Some of these rely on what their callers have checked, and crash without.
    is_private = op.startswith("aten._") or "unsafe" in op
    return "it is private to PyTorch, and has no rule" if is_private else ""


def results_of(made: Any) -> tuple[Any, ...]:
    """Return what an operator made as a tuple, lists flattened, without what it left out (`None`).

    An operator that makes nothing has the one result `None`.
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
    """Return what an operator with an output mask makes: `None` where the mask says so.

    Without data PyTorch makes some of these tensors all the same.
    """
    names = list(argument_types(target)) if isinstance(target, OpOverload) else []
    if "output_mask" not in names:
        return list(made)
    at = names.index("output_mask")
    mask = args[at] if at < len(args) else kwargs["output_mask"]
    return [part if wanted else None for part, wanted in zip(made, mask, strict=True)]


def makes_one_tensor(op: str) -> bool:
    """Whether a call gives a tensor (or a host number) itself, not a tuple or list of them."""
    found = operator_of(op)
    return op not in IN_PLACE and (
        not isinstance(found, OpOverload) or return_types(found) == ["Tensor"]
    )


def symbol_value(symbol: Symbol) -> Any:
    """Return the torch object a `Symbol` names.

    Raises:
        SbpValueError: it names none of its kind.
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
    """Return an argument as part of a dictionary's key, with `of(name)` for each `Ref`.

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
