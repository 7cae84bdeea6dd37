"""Convert graphs and values to double precision for proofs of equality, and compare results.

before: y = mm(x, w): bfloat16[2, 3];  z = _to_copy(y, dtype=float32)
after:  y = mm(x, w): float64[2, 3];   z = _to_copy(y, dtype=float64)

In float64, rounding errors are far below `TOLERANCE`. So a larger difference means that the graphs
compute different functions. Casts between floating-point types do nothing, so passes may move them.
Views become reshapes, which accept any memory layout. Random numbers are drawn for each sample,
also if the run would draw them for each shard.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sbp_core.graph import Argument, LogicalGraph, Symbol, TensorType

#: dtype -> dtype in double precision.
DOUBLE = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}

#: Random operators, which use the default dtype if no dtype is given.
_RANDOM = ("random_uniform", "random_normal")

#: Reshape, which accepts any memory layout.
_RESHAPE = "aten.reshape.default"

#: Views, which accept only some memory layouts.
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


def graph_to_double(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph in float64, for the CPU."""
    types = {
        name: replace(kind, dtype=DOUBLE[kind.dtype])
        if isinstance(kind, TensorType) and kind.dtype in DOUBLE
        else kind
        for name, kind in graph.types.items()
    }
    nodes = []
    for node in graph.nodes:
        args = tuple(map(_wide_argument, node.args))
        kwargs = {key: _wide_argument(value) for key, value in node.kwargs.items()}
        if kwargs.get("per_shard"):
            kwargs["per_shard"] = False
        makes = types[node.outputs[0]]
        reads = any(isinstance(types[value], TensorType) for value in node.inputs())
        is_factory = (node.op.startswith("aten.") and not reads) or node.kind in _RANDOM
        if is_factory and isinstance(makes, TensorType) and kwargs.get("dtype") is None:
            kwargs["dtype"] = Symbol("dtype", makes.dtype)  # else it takes the default dtype
        op = _RESHAPE if node.op in _VIEWS else node.op
        nodes.append(replace(node, op=op, args=args, kwargs=kwargs))
    return replace(graph, nodes=tuple(nodes), types=types)


def _wide_argument(argument: Argument) -> Argument:
    if isinstance(argument, Symbol):
        if argument.kind == "dtype":
            return Symbol("dtype", DOUBLE.get(argument.name, argument.name))
        return Symbol("device", "cpu") if argument.kind == "device" else argument
    if isinstance(argument, tuple):
        return tuple(map(_wide_argument, argument))
    return argument


#: Tolerance relative to the largest element. Another order of summation causes a millionth of it.
TOLERANCE = 1e-9

#: Largest absolute difference if the exact result is zero, because numbers near one cancel.
_REST = 1e-14


def largest(value: Tensor) -> float:
    """Return the largest absolute value that is finite; 0 if there is none."""
    plain = value.detach().abs()
    finite = plain[plain.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def to_double(value: Tensor) -> Tensor:
    """Return a value in double precision."""
    return value.to(torch.complex128 if value.dtype.is_complex else torch.float64)


def off_by(wanted: Tensor, found: Tensor, scale: float = 0.0) -> float:
    """Return the largest difference relative to the largest element; 0 if it is within rounding.

    NaN and infinities have to be at the same places.

    Args:
        wanted: The expected value.
        found: The actual value, of the same shape and dtype.
        scale: Lower bound of the divisor, in the units of the values, for results of cancellation:
            the size of the numbers that cancel.
    """
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
        return 0.0 if bool((wanted == found).all()) else float("inf")
    wanted, found = to_double(wanted), to_double(found)
    same = (wanted == found) | (wanted.isnan() & found.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((same | (wanted.isfinite() & found.isfinite())).all()):
        return float("inf")
    gap = largest((wanted - found)[~same])
    most = max(largest(wanted), scale)
    if most == 0:  # numbers that cancel in one value, and not quite in the other one
        return float("inf") if gap > _REST else 0.0
    return gap / most if gap > TOLERANCE * most else 0.0
