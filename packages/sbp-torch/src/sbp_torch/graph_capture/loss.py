"""Check the user's loss function before capture, and split its result into loss and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError, SbpTypeError
from sbp_torch.graph_capture.diagnostics import short

#: The loss of a batch, or the loss and metrics.
Loss = Callable[[nn.Module, Any], Any]

_ACCEPTED = (
    "one floating number (a 0-d tensor); a pair of it and a mapping of metrics; or a mapping with "
    "the key 'loss'"
)


def kind_told(value: object) -> str:
    """Describe a value of a wrong type for messages."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"of type {type(value).__name__}"


def check_loss(loss: object) -> None:
    """Check that a loss can be called with a model and a batch; criteria of PyTorch cannot.

    Raises:
        SbpTypeError: the loss cannot be called with a model and a batch.
    """
    if not callable(loss) or type(loss).__module__ == nn.MSELoss.__module__:
        raise SbpTypeError(
            f"loss is {kind_told(loss)}",
            accepted="a function loss(model, batch) that calls the model and returns its loss",
            todo='such as lambda model, batch: criterion(model(batch["x"]), batch["y"])',
        )
    function: Any = loss  # the Python function that a call of it reaches, if there is one
    while type(function) is partial:
        function = function.func
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = inspect.getattr_static(type(function), "__call__")
    function = function.__func__ if inspect.ismethod(function) else function
    claims = hasattr(function, "__signature__") or hasattr(loss, "__signature__")
    if not inspect.isfunction(function) or claims:  # its parameters are unknown
        return
    # A wrapper may take other arguments than the function that it wraps.
    signature = inspect.signature(loss, follow_wrapped=False)
    try:
        signature.bind("model", "batch")
    except TypeError:
        code = function.__code__
        raise SbpTypeError(
            f"loss takes {signature}, but is called as loss(model, batch)",
            where=f"{short(code.co_filename)}:{code.co_firstlineno}",
            accepted="a function of two positional arguments, the model and a batch",
            todo="let it take both: def loss(model, batch); what else it needs can be bound by "
            "functools.partial or a lambda",
        ) from None


def split_losses(made: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the loss and the metrics from the result of a loss function.

    If the result is a mapping (such as a model's own output), its other 0-d tensors are the
    metrics.

    Raises:
        CaptureError: the result holds no loss, or a metric that is no tensor.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping):
        made, metrics = made
    elif isinstance(made, Mapping) and "loss" in made:
        _check_metrics(
            {k: v for k, v in made.items() if k != "loss" and isinstance(v, int | float)}
        )
        metrics = {
            name: value
            for name, value in made.items()
            if name != "loss" and isinstance(value, Tensor) and value.dim() == 0
        }
        made = made["loss"]
    if not isinstance(made, Tensor) or made.dim() != 0 or not made.dtype.is_floating_point:
        raise _no_loss(made)
    _check_metrics(metrics)
    return made, metrics


def _no_loss(made: object) -> CaptureError:
    """Return the error for a result of a loss function that is no loss."""
    what, todo = type(made).__name__, "return the loss, a 0-d tensor that was computed by the model"
    if isinstance(made, Tensor):
        what = f"{made.dtype} of shape {tuple(made.shape)}"
        todo = (
            "make it one number: loss.mean() or loss.sum()"
            if made.dim()
            else "return a loss of floating numbers; counts can be metrics"
        )
    elif isinstance(made, int | float | complex | torch.SymFloat | torch.SymInt | torch.SymBool):
        what = "a number of Python, not a tensor"
        todo = "drop .item() or float() in the loss function: return the tensor"
    elif isinstance(made, tuple | list):
        parts = ("Tensor" if isinstance(part, Tensor) else type(part).__name__ for part in made)
        what = f"a {what} of {', '.join(parts) or 'nothing'}"
        todo = (
            "name the metrics by a mapping: return loss, {'accuracy': accuracy}; add several "
            "losses up to one: return a + b, {'a': a, 'b': b}"
        )
    elif isinstance(made, Mapping):
        what = f"a mapping of {', '.join(map(repr, made)) or 'nothing'}, without 'loss'"
        todo = "call the loss so: {'loss': loss, 'accuracy': accuracy}"
    elif made is None:
        what, todo = "None", "end the loss function with return loss"
    return CaptureError(f"the loss is {what}", accepted=_ACCEPTED, todo=todo)


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or name == "loss":
            raise CaptureError(
                f"the metric {name!r} is {type(value).__name__}",
                accepted="tensors, by other names than 'loss'",
                todo="leave it out, because the loop knows it; or return a tensor, which follows a "
                f"float that changes: {{{name!r}: "
                f"{name if name.isidentifier() else 'value'} * torch.ones(())}}"
                if isinstance(value, int | float)
                else "",
            )
