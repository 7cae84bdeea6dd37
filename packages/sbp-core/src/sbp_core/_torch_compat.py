"""The private corners of PyTorch that we use, in one place.

Each entry names the versions it was tried on. Everything else in the package uses public names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._C._autograd import _get_sequence_nr
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "annotated",
    "argument_types",
    "current_backward_node",
    "fake_mode",
    "functional_graph",
    "in_schema_order",
    "is_mutable",
    "last_forward_number",
    "reparametrized",
    "return_types",
    "trace_graph",
]


def fake_mode() -> FakeTensorMode:
    """Return a mode of tensors without data, with static shapes. Tried on 2.13."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def trace_graph(
    function: Callable[..., Any], mode: FakeTensorMode, inputs: Sequence[Any]
) -> fx.GraphModule:
    """Trace a Python function on fake tensors to ATen, autograd and mutations included.

    Tried on 2.13.
    """
    with (
        torch.autograd.set_multithreading_enabled(False),
        tracing(TracingContext(mode)),
        fx_traceback.preserve_node_meta(),
    ):
        module: fx.GraphModule = make_fx(function)(*inputs)
    return module


def functional_graph(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """Trace once more without mutations, keeping views. Tried on 2.13."""
    functional = torch.func.functionalize(function, remove="mutations")
    with fx_traceback.preserve_node_meta():
        module: fx.GraphModule = make_fx(functional)(*inputs)
    return module


@contextmanager
def annotated(note: Mapping[str, Any]) -> Iterator[None]:
    """Attach a note to every FX node made inside, as `node.meta["custom"]`. Tried on 2.13."""
    with fx_traceback.annotate(dict(note)):
        yield


@contextmanager
def reparametrized(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Swap a module's parameters and buffers, tied ones too. Tried on 2.13."""
    with stateless._reparametrize_module(module, dict(tensors), tie_weights=True):
        yield


def last_forward_number() -> int:
    """Return the sequence number of the newest autograd node. Tried on 2.13."""
    return int(_get_sequence_nr()) - 1


def current_backward_node() -> int | None:
    """Return the sequence number of the autograd node that runs now, if any. Tried on 2.13."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def is_mutable(op: OpOverload) -> bool:
    """Whether an operator writes to its arguments. Tried on 2.13."""
    return bool(op._schema.is_mutable)


def argument_types(op: OpOverload) -> dict[str, str]:
    """Return the type of each argument by name, in order: `Tensor`, `List[Tensor]`, `int`, ...

    Tried on 2.13.
    """
    return {entry.name: str(entry.type) for entry in op._schema.arguments}


def in_schema_order(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call as the dispatcher passes them on, the same call.

    By position up to the last one that is given and may be, with defaults in between; the others by
    name, in the order of the schema. Tried on 2.13.
    """
    rest, ordered = dict(kwargs), list(args)
    listed = op._schema.arguments
    placed = [entry for entry in listed if not entry.kwarg_only]
    last = max((at for at, entry in enumerate(placed) if entry.name in rest), default=-1)
    for entry in placed[len(ordered) : last + 1]:
        ordered.append(rest.pop(entry.name) if entry.name in rest else entry.default_value)
    named = {entry.name: rest.pop(entry.name) for entry in listed if entry.name in rest}
    return ordered, named | rest


def return_types(op: OpOverload) -> list[str]:
    """Return the type of each result, in order. Tried on 2.13."""
    return [str(entry.type) for entry in op._schema.returns]
