"""A captured step for another kind of device: a pass rewrites it, fake tensors say the rest.

Operators may make other auxiliary results on another device (the offsets that `embedding_bag`
saves), or have no kernel there. Fake tensors of any kind of device tell, without such a device.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from sbp_aten.passes import place_on_device
from sbp_core.errors import CaptureError, GraphError
from sbp_core.graph import LogicalGraph, Node, TensorType, ValueType
from sbp_torch._torch_compat import fake_mode
from sbp_torch._torch_patches import frames_told_apart_by_folder
from sbp_torch.ops import operators

#: Kinds of devices that a step can be captured for.
DEVICES = ("cpu", "cuda")


def on_device(graph: LogicalGraph, device: str) -> LogicalGraph:
    """Return a graph that was captured on CPUs as it is on another kind of device.

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
        raise error.replaced(CaptureError) from error
    types = dict(placed.types)
    calls = _Calls(device)
    with torch.no_grad(), fake_mode(), frames_told_apart_by_folder():
        values = {entry.name: calls.input(types[entry.name]) for entry in placed.inputs}
        for node in placed.nodes:
            made = calls.of(node, values)
            for name, value in zip(node.outputs, made, strict=True):
                values[name] = value
                if torch.is_tensor(value):
                    dtype = str(value.dtype).removeprefix("torch.")
                    types[name] = TensorType(tuple(value.shape), dtype)
    return placed.with_nodes(placed.nodes, types=types)


class _Calls:
    """Calls operators on fake tensors, equal calls once: layers repeat.

    What an operator makes of fake tensors follows from how these lie alone, so tensors that lie
    alike are one object here, and calls on the same objects with the same numbers are one call.

        layer 1   mm(t0, t1) -> t2      called
        layer 2   mm(t0, t1) -> t2      known
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._tensors: dict[Hashable, torch.Tensor] = {}
        self._known: dict[Hashable, tuple[Any, ...]] = {}

    def input(self, kind: ValueType) -> Any:
        """Return what stands for an input of a type: a fake tensor; of numbers of the host, 1."""
        if not isinstance(kind, TensorType):
            return 1.0 if kind.dtype == "float" else 1
        dtype = getattr(torch, kind.dtype)
        return self._interned(torch.empty(kind.shape, dtype=dtype, device=self._device))

    def of(self, node: Node, values: dict[str, Any]) -> tuple[Any, ...]:
        """Return what a node makes.

        Raises:
            CaptureError: the operator does not run on the device.
        """

        def of(
            name: str,
        ) -> Hashable:  # tensors, which are kept, are told by which objects they are
            value = values[name]
            return (type(value), value) if isinstance(value, int | float) else id(value)

        call = node.op, operators.frozen((node.args, tuple(node.kwargs.items())), of)
        if call not in self._known:
            try:
                made = operators.call(node.op, node.args, node.kwargs, values.__getitem__)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                line = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise CaptureError(
                    f"{node.op} does not run on {self._device}: {line}",
                    where=(f"op {node.name!r}, module {node.module!r}", node.source),
                    todo="leave it out of the model, or train on CPUs",
                ) from error
            self._known[call] = tuple(map(self._interned, made))
        return self._known[call]

    def _interned(self, value: Any) -> Any:
        """Return the first tensor that lies as one does; numbers and known values themselves."""
        if not isinstance(value, torch.Tensor) or getattr(value, "constant", None) is not None:
            return value
        lies = (
            value.dtype,
            value.device,
            value.layout,
            tuple(value.shape),
            value.stride() if value.layout is torch.strided else None,
            value.storage_offset() if value.layout is torch.strided else None,
            value.untyped_storage().nbytes() if value.layout is torch.strided else None,
            value.is_conj(),
            value.is_neg(),
        )
        return self._tensors.setdefault(lies, value)
