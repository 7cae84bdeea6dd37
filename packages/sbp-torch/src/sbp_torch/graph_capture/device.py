"""Convert a captured step to another kind of device: a pass rewrites it, with fake tensors.

Operators may make other auxiliary results on another device (the offsets that `embedding_bag`
saves), or have no kernel there. Fake tensors of a device kind show this without such a device.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from sbp_aten.passes import place_on_device
from sbp_core.errors import CaptureError, GraphError
from sbp_core.graph import LogicalGraph, TensorType
from sbp_torch._torch_compat import fake_mode
from sbp_torch._torch_patches import frames_told_apart_by_folder
from sbp_torch.ops import operators

#: Kinds of devices that a step can be captured for.
DEVICES = ("cpu", "cuda")


def on_device(graph: LogicalGraph, device: str) -> LogicalGraph:
    """Return a graph that was captured on CPUs in its form for another kind of device.

    The results of an operator on fake tensors depend only on their layouts. So tensors of equal
    layout are one object here, and calls on the same objects with the same numbers are made once,
    because layers repeat:

        layer 1   mm(t0, t1) -> t2      called
        layer 2   mm(t0, t1) -> t2      reused

    Raises:
        CaptureError: there is no such kind of device, or an operator does not run there. The error
            names the operator and its source line.
    """
    if device not in DEVICES:
        raise CaptureError(f"device={device!r}", accepted=", ".join(DEVICES))
    if device == "cpu":
        return graph
    try:
        placed = place_on_device(graph, device)
    except GraphError as error:
        raise error.replaced(CaptureError) from error
    types, values = dict(placed.types), dict[str, Any]()
    tensors: dict[Hashable, torch.Tensor] = {}
    known: dict[Hashable, tuple[Any, ...]] = {}

    def frozen(name: str) -> Hashable:  # tensors are kept alive, so their ids identify them
        value = values[name]
        return (type(value), value) if isinstance(value, int | float) else id(value)

    with torch.no_grad(), fake_mode(), frames_told_apart_by_folder():
        for entry in placed.inputs:  # a fake tensor for each tensor, and 1 for each number
            kind = types[entry.name]
            value: Any = 1.0 if kind.dtype == "float" else 1
            if isinstance(kind, TensorType):
                value = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device=device)
            values[entry.name] = _intern(value, tensors)
        for node in placed.nodes:
            call = node.op, operators.freeze((node.args, tuple(node.kwargs.items())), frozen)
            if call not in known:
                try:
                    made = operators.call(node.op, node.args, node.kwargs, values.__getitem__)
                except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
                    raise CaptureError(
                        f"{node.op} does not run on {device}: {line}",
                        where=(f"op {node.name!r}, module {node.module!r}", node.source),
                        todo="leave it out of the model, or train on CPUs",
                    ) from error
                known[call] = tuple(_intern(one, tensors) for one in made)
            for name, value in zip(node.outputs, known[call], strict=True):
                values[name] = value
                if torch.is_tensor(value):
                    dtype = str(value.dtype).removeprefix("torch.")
                    types[name] = TensorType(tuple(value.shape), dtype)
    return placed.with_nodes(placed.nodes, types=types)


def _intern(value: Any, tensors: dict[Hashable, torch.Tensor]) -> Any:
    """Return the first tensor of the same layout; return numbers and known values themselves."""
    if not isinstance(value, torch.Tensor) or getattr(value, "constant", None) is not None:
        return value
    lies: tuple[Hashable, ...] = (value.dtype, value.device, value.layout, tuple(value.shape))
    lies += (value.is_conj(), value.is_neg())
    if value.layout is torch.strided:
        lies += (value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    return tensors.setdefault(lies, value)
