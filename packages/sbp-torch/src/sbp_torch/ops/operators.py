"""From the names of operators in graphs and plans to what executes them on tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from sbp_core.errors import GraphError, SbpValueError
from sbp_core.graph import Argument, Ref, Symbol
from sbp_torch._torch_compat import OpOverload, argument_types, return_types
from sbp_torch.ops import batch_norm as _batch_norm  # noqa: F401 - registers sbp.batch_norm_sums
from sbp_torch.ops import constants as _constants  # noqa: F401 - registers sbp.constant
from sbp_torch.ops import random as _random_ops  # noqa: F401 - registers sbp.random_*
from sbp_torch.ops import wide_products as _wide_products  # noqa: F401 - registers sbp.mm_as
from sbp_torch.ops.fused_updates import IN_PLACE  # registers sbp.fused_*

_HOST: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "pow": operator.pow,
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
_OWN: dict[str, Callable[..., Any]] = {"sbp.after": _after, "sbp.piece": _piece, **IN_PLACE}


#: What `torch.ops.aten.add` is, without its overload.
_Packet = type(torch.ops.aten.add)

_SYMBOLS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


@cache
def operator_of(op: str) -> Callable[..., Any]:
    """Return the callable of an operator name.

    `aten.*` and custom namespaces come from `torch.ops`; `host.*` are Python's own on numbers.

    Raises:
        GraphError: torch has no such operator.
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
    # `torch.ops` has functions of its own beside operators.
    if len(overload) > 1 or not isinstance(found, OpOverload | _Packet):
        raise GraphError(
            f"no operator is called {op!r} here",
            accepted=f"operators of torch {torch.__version__} and of torch.library",
            todo="import the package that registers it",
        )
    made: Callable[..., Any] = found
    return made


def results_of(made: Any) -> tuple[Any, ...]:
    """Return what an operator made as a tuple, lists flattened, without what it left out (`None`).

    An operator that makes nothing has the one result `None`.
    """
    if not isinstance(made, tuple | list):
        return (made,)
    return tuple(part for entry in made if entry is not None for part in results_of(entry))


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


def bind(argument: Argument, read: Callable[[str], Any]) -> Any:
    """Return an argument with symbols resolved and each `Ref` replaced by `read(name)`."""
    if isinstance(argument, Ref):
        return read(argument.name)
    if isinstance(argument, Symbol):
        return symbol_value(argument)
    if isinstance(argument, tuple):
        return [bind(part, read) for part in argument]
    return argument
