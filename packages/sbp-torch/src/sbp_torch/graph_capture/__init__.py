"""Capture: an ordinary PyTorch training step -> `LogicalGraph`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError, SbpTypeError
from sbp_core.graph import LogicalGraph
from sbp_torch.graph_capture.batch import SampleDims, as_written, flatten_batch, rebuild_batch
from sbp_torch.graph_capture.device import on_device
from sbp_torch.graph_capture.diagnostics import TraceError, check_modes
from sbp_torch.graph_capture.fx_conversion import to_logical
from sbp_torch.graph_capture.loss import Loss, check_loss, kind_told, split_losses
from sbp_torch.graph_capture.numbers import (
    NO_NUMBERS,
    NumberPlace,
    check_numbers,
    difference,
    host_numbers,
    placed,
    without_unused,
)
from sbp_torch.graph_capture.optimizer_states import VELOCITY
from sbp_torch.graph_capture.randomness import counted_random
from sbp_torch.graph_capture.step import TraceableStep, model_tensors, trainable
from sbp_torch.graph_capture.trace import TracedStep, trace_step
from sbp_torch.graph_capture.update import LossScaling, Update, UpdateOptions, current_scalars

__all__ = [
    "NO_NUMBERS",
    "VELOCITY",
    "LossScaling",
    "NumberPlace",
    "SampleDims",
    "UpdateOptions",
    "capture",
    "check_modes",
    "check_numbers",
    "copied_states",
    "counted_random",
    "current_scalars",
    "difference",
    "flatten_batch",
    "host_numbers",
    "initial_states",
    "placed",
    "rebuild_batch",
    "scalar_values",
    "split_losses",
    "trainable",
    "without_unused",
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
    device: str = "cpu",
    numbers: Mapping[str, NumberPlace] = NO_NUMBERS,
) -> LogicalGraph:
    """Capture one whole step as one functional ATen graph: forward, loss, backward, update.

    The graph computes the same as eager PyTorch, bit for bit. Nothing is run, and `model` and
    `optimizer` do not change. Random ops become counter-based ones (see `randomness`): the graph
    then has the scalar inputs `seed` and `draw`, and `counted_random` makes eager PyTorch draw the
    same numbers.

    Args:
        model: The one-device program.
        loss: `loss(model, batch)` returns a 0-d floating tensor; or a pair of it and a mapping of
            metrics; or a mapping with the key `loss`, whose other 0-d tensors are metrics.
        batch: An example of one micro-batch: tensors, nested in mappings, sequences and
            dataclasses; only shapes and dtypes matter. The graph's inputs have the names of
            `flatten_batch`.
        optimizer: An optimizer of `model.parameters()`; None captures forward and loss only.
        update: Options of the update next to the optimizer: clipping, averages, loss scaling.
        name: Name of the graph in reports.
        autocast: Run the forward under `torch.autocast` to this dtype, such as `bfloat16`.
        per_shard_random: Whether every shard draws random numbers from its own generator, which is
            faster, but makes the numbers depend on the mesh.
        device: Kind of device that the step will run on, `cpu` or `cuda`. The model is not moved,
            and capture does not need the device.
        numbers: Places of floats that forward and loss read, by the names of their scalar inputs;
            unused ones become no input. Forward and loss may calculate with these floats, but must
            not branch on their values: check the graph with `check_numbers`.

    Raises:
        SbpTypeError: `model`, `loss` or `optimizer` has another type.
        CaptureError: the step cannot be captured; the error names the line of the user's code.
    """
    _check_program(model, optimizer)
    check_loss(as_written(loss))
    if optimizer is not None:
        check_modes()
    updating = Update(model, optimizer, update, device) if optimizer is not None else None

    def traced(*, as_compiling: bool) -> LogicalGraph:
        make = partial(
            TraceableStep,
            model,
            loss,
            batch,
            updating,
            autocast=autocast,
            per_shard_random=per_shard_random,
            as_compiling=as_compiling,
            numbers=numbers,
        )
        graph = to_logical(_trace_until_stable(make), name)
        return on_device(without_unused(graph, numbers), device)

    try:
        return traced(as_compiling=False)
    except TraceError as stopped:
        # Some models read values (mostly of masks), except while they are being compiled. If they
        # still fail then, the second error is the one to report.
        try:
            return traced(as_compiling=True)
        except TraceError:
            raise
        except CaptureError:
            raise stopped from None


def _trace_until_stable(make: Callable[..., TraceableStep]) -> TracedStep:
    """Trace a step whose forward has no side effects, or has them only once.

    A side effect that happens once, such as filling a cache, is harmless: the second step has no
    side effects, and computes the same as the first one.
    """
    step = make()
    traced = trace_step(step)
    if step.side_effects:
        try:
            second_step = make(previous=step)
            second = trace_step(second_step)
        except CaptureError:
            raise step.side_effects[0].refusal() from None
        if second_step.side_effects or second.form != traced.form:
            raise step.side_effects[0].refusal()
    return traced


def _check_program(model: object, optimizer: object) -> None:
    """Check the types of the arguments, which would otherwise fail later with unclear errors.

    Raises:
        SbpTypeError: one of them has another type.
    """
    if not isinstance(model, nn.Module):
        raise SbpTypeError(f"model is {kind_told(model)}", accepted="a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise SbpTypeError(
            f"optimizer is {kind_told(optimizer)}",
            accepted="an optimizer over model.parameters(), such as "
            "torch.optim.AdamW(model.parameters()); None for no update",
        )


def initial_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    update: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
    *,
    copy: bool = True,
) -> dict[str, Tensor]:
    """Return every state of the graph by its input name: parameters, buffers, optimizer states.

    Args:
        model: The one-device program.
        optimizer: An optimizer of its parameters; None leaves its states out.
        update: The options that `capture` gets.
        copy: Whether the tensors are copies. Otherwise they are the model's own tensors, which must
            not be changed, and a state of one repeated number may be an expanded tensor. A session
            copies the states that it keeps.

    Raises:
        SbpTypeError: `model` or `optimizer` has another type.
    """
    _check_program(model, optimizer)
    found = model_tensors(model)
    if optimizer is not None:
        found |= Update(model, optimizer, update).values()
    plain = {name: tensor.detach() for name, tensor in found.items()}
    if not copy:
        return plain
    # A plain clone of an expanded number would keep its strides of 0.
    for name, tensor in plain.items():
        is_one = tensor.dim() and not any(tensor.stride())
        form = torch.contiguous_format if is_one else torch.preserve_format
        plain[name] = tensor.clone(memory_format=form)
    return plain


def copied_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    update: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
) -> dict[str, tuple[str, torch.dtype]]:
    """Return the states that begin as copies of a parameter, with that parameter and the dtype.

    For example, moving averages have to begin again if the parameters get other values.

    Args:
        model: The one-device program.
        optimizer: An optimizer of its parameters.
        update: The options that `capture` gets.
    """
    updating = Update(model, optimizer, update)
    values, copies = updating.values(), updating.copies()
    return {
        entry.name: (entry.of, values[entry.name].dtype)
        for entry in updating.inputs()
        if entry.name in copies and entry.of
    }


def scalar_values(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    update: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
) -> dict[str, float]:
    """Return the present scalar inputs of the update: learning rates and other settings."""
    Update(model, optimizer, update)  # this checks the arguments
    return current_scalars(optimizer, update)
