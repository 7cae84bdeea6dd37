"""Capture: an ordinary PyTorch training step -> `LogicalGraph`. The only room that knows FX.

Stability: provisional.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_core.exports import make_callable
from sbp_core.graph import LogicalGraph
from sbp_torch.capture.batch import flatten_batch
from sbp_torch.capture.convert import to_logical
from sbp_torch.capture.diagnostics import TraceError
from sbp_torch.capture.randomness import counted_random
from sbp_torch.capture.step import Loss, TrainingStep, model_tensors, split_losses
from sbp_torch.capture.trace import TracedStep, trace_step
from sbp_torch.capture.update import LossScaling, Update, UpdateOptions

__all__ = [
    "LossScaling",
    "UpdateOptions",
    "capture",
    "counted_random",
    "flatten_batch",
    "initial_states",
    "scalar_values",
    "split_losses",
]


def capture(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    update: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
    name: str = "train",
    autocast: str = "",
    per_shard_random: bool = False,
) -> LogicalGraph:
    """Capture one whole step as one functional ATen graph: forward, loss, backward, update.

    The graph computes what eager PyTorch computes, bit for bit. Nothing is run and nothing changes
    on `model` or `optimizer`. Random ops are restated by counting (see `capture.randomness`): the
    graph then has the scalar inputs `seed` and `draw`, and `counted_random` makes eager PyTorch
    draw the same numbers.

    Args:
        model: The one-device program.
        loss: `loss(model, batch)` returns a 0-d floating tensor; or that and a mapping of metrics;
            or a mapping with the key `loss`, whose other 0-d tensors are metrics.
        batch: An example of one micro-batch: tensors, nested in mappings, sequences and
            dataclasses; only shapes and dtypes matter. The graph's inputs are named as by
            `flatten_batch`.
        optimizer: Over `model.parameters()`; None captures forward and loss only.
        update: What happens once a step beside the optimizer: clipping, averages, loss scaling.
        name: What reports call the graph.
        autocast: Run the forward under `torch.autocast` to this dtype, such as `bfloat16`.
        per_shard_random: Let every shard draw random numbers from a generator of its own: faster,
            but other numbers on every mesh.

    Raises:
        CaptureError: the step cannot be captured, with the line of the user's code.
    """
    updating = Update(model, optimizer, update) if optimizer is not None else None

    def trace(
        *, as_compiling: bool, settled: TrainingStep | None = None
    ) -> tuple[TrainingStep, TracedStep]:
        step = TrainingStep(
            model,
            loss,
            batch,
            updating,
            autocast=autocast,
            per_shard_random=per_shard_random,
            as_compiling=as_compiling,
            settled=settled,
        )
        return step, trace_step(step)

    def trace_settled(*, as_compiling: bool) -> LogicalGraph:
        step, traced = trace(as_compiling=as_compiling)
        if step.left:
            # A forward that sets attributes once and for all does the same in its second step.
            try:
                again, second = trace(as_compiling=as_compiling, settled=step)
            except CaptureError:
                raise step.left[0].refusal() from None
            if again.left or second.form != traced.form:
                raise step.left[0].refusal()
        return to_logical(traced, name)

    try:
        return trace_settled(as_compiling=False)
    except TraceError as stopped:
        # Some models look at values (of masks, mostly), but not while they are being compiled. What
        # stops them then is what has to be changed.
        try:
            return trace_settled(as_compiling=True)
        except TraceError:
            raise
        except CaptureError:
            raise stopped from None


def initial_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    update: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
) -> dict[str, Tensor]:
    """Return every state of the graph by its input name: parameters, buffers, optimizer states.

    The tensors are copies; training does not change the model they came from.
    """
    found = model_tensors(model)
    if optimizer is not None:
        found |= Update(model, optimizer, update).values()
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def scalar_values(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    update: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
) -> dict[str, float]:
    """Return what the scalar inputs of the update are now: learning rates and other settings."""
    return Update(model, optimizer, update).scalar_values()


make_callable(__name__)
