"""What running graphs in a proof means: in double precision, how long, and when values are equal.

before: y = mm(x, w): bfloat16[2, 3];  z = _to_copy(y, dtype=float32)
after:  y = mm(x, w): float64[2, 3];   z = _to_copy(y, dtype=float64)

Graphs that differ in double precision mean different things. Conversions between floats come to
nothing there, so where a pass has placed them makes no difference. Views become reshapes, which do
not ask how their arguments are laid out in memory. Random numbers are those that are counted by
sample, also where a run draws from a generator for each shard.
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

#: What numbers become: those of a higher precision, or the same ones.
WIDE = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}

#: What draws floats, of the default dtype if it is told none.
_RANDOM = ("random_uniform", "random_normal")

#: What takes any argument.
_RESHAPE = "aten.reshape.default"

#: What takes views of contiguous arguments only.
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
            kwargs["dtype"] = Symbol("dtype", makes.dtype)  # the default dtype, if it is told none
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


#: Of one core of a server, in double precision, flop/s and bytes/s; and seconds of a call.
#: Only an order of magnitude: a proof asks whether something takes a second or an hour.
_FLOP_PER_S = 10e9
_BYTES_PER_S = 0.5e9
_CALL_S = 20e-6


def run_s(graph: LogicalGraph, nodes: Iterable[Node]) -> float:
    """Return the seconds that some nodes of a graph take in one step, all micro-batches."""
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
    """Return the seconds in which so many bytes are read or written."""
    return num_bytes / _BYTES_PER_S


#: Largest difference, of the largest element: sums in another order are off by a millionth of it.
TOLERANCE = 1e-9

#: Largest rest of numbers near one that cancel.
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
    """Return how far two values are off each other, of their largest element; 0 if within rounding.

    What is infinite or no number has to be so in both.

    Args:
        wanted: One.
        found: The other.
        scale: What else counts as large: elements that come from cancellation are judged by
            what has cancelled. In the units of the values.
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
    if most == 0:  # of what cancels in one, and not quite in the other
        return float("inf") if gap > _REST else 0.0
    return gap / most if gap > TOLERANCE * most else 0.0
