"""Capture: an ordinary PyTorch training step -> `LogicalGraph`. The only room that knows FX."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sbp_core._callable_module import make_callable
from sbp_core.capture.convert import to_logical
from sbp_core.capture.trace import Loss, optimizer_states, trace_step
from sbp_core.graph.ir import LogicalGraph

__all__ = ["capture", "initial_states"]


def capture(
    model: nn.Module,
    loss: Loss,
    batch: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    name: str = "train",
) -> LogicalGraph:
    """Capture one whole step as one functional ATen graph: forward, loss, backward, update.

    The graph computes what eager PyTorch computes, bit for bit. Nothing is run and nothing changes
    on `model` or `optimizer`.

    Args:
        model: The one-device program.
        loss: `loss(model, batch)` returns a 0-d floating tensor.
        batch: An example of one micro-batch: tensors by name; only shapes and dtypes matter.
        optimizer: Over `model.parameters()`, not fused; None captures forward and loss only.
        name: What reports call the graph.

    Raises:
        CaptureError: the step cannot be captured, with the line of the user's code.
    """
    return to_logical(trace_step(model, loss, batch, optimizer), name)


def initial_states(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Return every state of the graph by its input name: parameters, buffers, optimizer states.

    The tensors are copies; training does not change the model they came from.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    if optimizer is not None:
        for name, states in optimizer_states(model, optimizer).items():
            found |= {f"{name}.{key}": value.detach().clone() for key, value in states.items()}
    return found


make_callable(__name__)
