"""Helpers to prove by execution that two graphs are equal: float64 graphs, run times, comparison.

before: y = mm(x, w): bfloat16[2, 3];  z = _to_copy(y, dtype=float32)
after:  y = mm(x, w): float64[2, 3];   z = _to_copy(y, dtype=float64)

In float64, rounding errors are far below `TOLERANCE`. So a larger difference means that the graphs
compute different functions. Casts between floating-point types do nothing, so passes may move them.
Views become reshapes, which accept any memory layout. Random numbers are drawn for each sample,
also if the run would draw them for each shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from sbp_core.errors import SbpError
from sbp_core.graph import Argument, LogicalGraph, Node, Symbol, TensorType
from sbp_core.signatures import OpCall, work_flop

#: dtype -> dtype in double precision.
WIDE = {
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


def widened(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph in float64, for the CPU."""
    types = {
        name: replace(kind, dtype=WIDE[kind.dtype])
        if isinstance(kind, TensorType) and kind.dtype in WIDE
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
            return Symbol("dtype", WIDE.get(argument.name, argument.name))
        return Symbol("device", "cpu") if argument.kind == "device" else argument
    if isinstance(argument, tuple):
        return tuple(map(_wide_argument, argument))
    return argument


#: Rates of one server core in double precision, in flop/s and bytes/s; and seconds of a call.
#: Only orders of magnitude: a proof has to know whether something takes a second or an hour.
_FLOP_PER_S = 10e9
_BYTES_PER_S = 0.5e9
_CALL_S = 20e-6


def run_s(graph: LogicalGraph, nodes: Iterable[Node]) -> float:
    """Return the estimated seconds of some nodes of a graph in one step of all micro-batches."""
    total_s = 0.0
    for node in nodes:
        each_s = _CALL_S
        if not node.is_host and "view" not in node.tags:
            kinds = [graph.types[name] for name in (*node.inputs(), *node.outputs)]
            each_s += bytes_s(sum(one.size_bytes for one in kinds if isinstance(one, TensorType)))
            with suppress(SbpError):
                each_s += work_flop(OpCall.of(graph, node)) / _FLOP_PER_S
        total_s += graph.repetitions[node.rate] * each_s
    return total_s


def bytes_s(num_bytes: int) -> float:
    """Return the estimated seconds to read or write some bytes."""
    return num_bytes / _BYTES_PER_S


#: Tolerance relative to the largest element. Another order of summation causes a millionth of it.
TOLERANCE = 1e-9

#: Largest absolute difference if the exact result is zero, because numbers near one cancel.
_REST = 1e-14


def largest(value: Tensor) -> float:
    """Return the largest absolute value that is finite; 0 if there is none."""
    plain = value.detach().abs()
    finite = plain[plain.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def wide(value: Tensor) -> Tensor:
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
    wanted, found = wide(wanted), wide(found)
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
