"""Read the arguments of an operator call, by position or by name.

The sharding rules of operators use it. It does not know what any operator computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sbp_core.graph.ir import Argument, Ref, map_refs
from sbp_core.signatures.call import OpCall

#: Position of an argument that can be given by name only.
KEYWORD_ONLY = 1 << 16


def argument(call: OpCall, index: int, name: str, default: Argument = None) -> Any:
    """Return an argument given by position or by name, or the default of the operator."""
    if index < len(call.args):
        return call.args[index]
    return call.kwargs.get(name, default)


def tensors_as_refs(call: OpCall) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """Return (args, kwargs) with each tensor replaced by a `Ref` to its position among tensors.

    Host scalars become `Ref("host")`. So calls that differ only in the names of values are equal.
    """
    names = set(call.tensor_names)
    count = iter(range(len(call.inputs)))

    def rename(ref: Ref) -> Ref:
        return Ref(str(next(count))) if ref.name in names else Ref("host")

    args = map_refs(call.args, rename)
    kwargs = {key: map_refs(value, rename) for key, value in call.kwargs.items()}
    return args, kwargs


def tensor_position(call: OpCall, index: int, name: str) -> int | None:
    """Return the position of one argument among the tensor arguments; None if it is no tensor."""
    args, kwargs = tensors_as_refs(call)
    value = args[index] if index < len(args) else kwargs.get(name)
    return int(value.name) if isinstance(value, Ref) and value.name != "host" else None


def call_key(call: OpCall) -> str:
    """Return a cache key: a text of op, literals, shapes and tags, without names of values."""
    args, kwargs = tensors_as_refs(call)
    types = ",".join(f"{entry.dtype}{entry.shape}" for entry in (*call.inputs, *call.outputs))
    return f"{call.op}{args!r}{sorted(kwargs.items())!r}{types}/{len(call.inputs)}{call.tags}"


def wrap_dim(dim: int, num_dims: int) -> int:
    """Return a dim >= 0 for one that may be negative; 0-d tensors count as having one dim."""
    return dim % max(num_dims, 1)


def wrap_dims(dims: int | tuple[int, ...] | None, num_dims: int) -> tuple[int, ...]:
    """Return the dims that an argument `dim=` means: None means all."""
    if dims is None or dims == ():
        return tuple(range(num_dims))
    listed = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({wrap_dim(dim, num_dims) for dim in listed} & set(range(num_dims))))


def labels(prefix: str, count: int) -> Iterator[str]:
    """Yield `prefix0`, `prefix1`, ...: one label for each dim."""
    return (f"{prefix}{index}" for index in range(count))
