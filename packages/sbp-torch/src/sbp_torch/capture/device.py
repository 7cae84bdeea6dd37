"""A captured step for another kind of device: a pass rewrites it, fake tensors say the rest.

Operators may make other auxiliary results on another device (the offsets that `embedding_bag`
saves), or have no kernel there. Fake tensors of any kind of device tell, without such a device.
"""

from __future__ import annotations

from typing import Any

import torch

from sbp_aten.passes import place_on_device
from sbp_core.errors import CaptureError, GraphError
from sbp_core.graph import LogicalGraph, Node, TensorType, ValueType
from sbp_torch._torch_compat import fake_mode
from sbp_torch.ops.operators import bind, operator_of, results_of

#: Kinds of devices that a step can be captured for.
DEVICES = ("cpu", "cuda")


def on_device(graph: LogicalGraph, device: str) -> LogicalGraph:
    """Return a graph that was captured on CPUs as it is on another kind of device.

    Args:
        graph: As captured.
        device: `cpu` or `cuda`; for `cpu`, the graph itself.

    Raises:
        CaptureError: there is no such kind of device, or an operator does not run there; says
            which, and where it comes from.
    """
    if device not in DEVICES:
        raise CaptureError(f"device={device!r}", accepted=", ".join(DEVICES))
    if device == "cpu":
        return graph
    try:
        placed = place_on_device(graph, device)
    except GraphError as error:
        raise CaptureError(
            error.what, where=error.where, accepted=error.accepted, todo=error.todo
        ) from error
    types = dict(placed.types)
    with torch.no_grad(), fake_mode():
        values = {entry.name: _like(types[entry.name], device) for entry in placed.inputs}
        for node in placed.nodes:
            made = _run(node, values, device)
            for name, value in zip(node.outputs, made, strict=True):
                values[name] = value
                if torch.is_tensor(value):
                    dtype = str(value.dtype).removeprefix("torch.")
                    types[name] = TensorType(tuple(value.shape), dtype)
    return placed.with_nodes(placed.nodes, types=types)


def _like(kind: ValueType, device: str) -> Any:
    """Return a fake tensor, or a number, of a type; host numbers are 1."""
    if not isinstance(kind, TensorType):
        return 1.0 if kind.dtype == "float" else 1
    return torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device=device)


def _run(node: Node, values: dict[str, Any], device: str) -> tuple[Any, ...]:
    args = bind(node.args, values.__getitem__)
    kwargs = {name: bind(value, values.__getitem__) for name, value in node.kwargs.items()}
    try:
        return results_of(operator_of(node.op)(*args, **kwargs))
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CaptureError(
            f"{node.op} does not run on {device}: {line}",
            where=(f"op {node.name!r}, module {node.module!r}", node.source),
            todo="leave it out of the model, or train on CPUs",
        ) from error
