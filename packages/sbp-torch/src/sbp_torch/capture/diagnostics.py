"""What is said of a program that cannot be captured: why, at which line, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from sbp_core.errors import CaptureError, SbpError
from sbp_torch.capture.sources import library_call, user_frame

_GENERAL = "static shapes, no control flow on tensor values, no in-place change of inputs"

#: What does not hold, and the remedy.
_BY_VALUE = (
    "control flow or a Python number depends on the value of a tensor",
    "choose with torch.where instead of if; keep the value a tensor instead of .item(), bool() or "
    ".tolist(); leave out what asserts something of values; in a library's model, switch off the "
    "setting that leads to this line",
)
_BY_SHAPE = (
    "the shape of a tensor depends on the values of another",
    "use static shapes: torch.where or a multiplication by the mask instead of x[mask], "
    "nonzero(), unique() or masked_select(); one_hot(x, n).sum(0) instead of bincount(x, "
    "minlength=n); a mask that the loss or forward makes of sizes alone may choose, such as "
    "torch.eye(512)",
)

#: By a part of PyTorch's message or the name of its exception.
_KINDS = (
    (
        (
            "GuardOnDataDependentSymNode",
            "DataDependentOutputException",
            "_local_scalar_dense",
            "trying to get value out of a tracing tensor",
        ),
        *_BY_VALUE,
    ),
    (
        ("DynamicOutputShapeException", "nonzero", "unbacked"),
        *_BY_SHAPE,
    ),
    (
        ("type must be tuple of ints,but got",),
        "a size is read from a tensor",
        "give sizes as Python numbers; instead of a packed sequence (pack_padded_sequence) run the "
        "layer on the padded one, and read its last outputs with gather at the lengths - 1",
    ),
    (
        ("SparseTensorImpl", "SparseCsrTensorImpl", "Sparse CSR tensors", "SparseCPU"),
        "a tensor is sparse",
        "make it dense: .to_dense(); or compute with its indices and values: torch.index_add, "
        "torch.scatter_add",
    ),
    (
        ("leaf Variable that requires grad", "a leaf variable that requires grad"),
        "a parameter is changed in place during the forward",
        "compute a new tensor from it, or keep what changes in a buffer",
    ),
)


class TraceError(CaptureError):
    """A trace that the user's own code stopped: told that it is being compiled, it might not."""


def refusal(
    program: str, error: Exception, sizes_by_value: Mapping[str, tuple[str, str]]
) -> TraceError:
    """Return the error for a program whose trace failed.

    Args:
        program: What it is called.
        error: What the trace raised.
        sizes_by_value: The op and the line that made a size, by the name in PyTorch's messages.
    """
    if isinstance(error, SbpError):  # of the user's own model: it says itself what is accepted
        return error.replaced(
            TraceError,
            what=f"{program} cannot be captured: {error.what}",
            where=(*error.where, user_frame(error)),
        )
    text = f"{type(error).__name__}: {error}"
    if "HigherOrderOperator cond" in text or "torch.cond" in text:
        return TraceError(
            f"{program} cannot be captured: torch.cond chooses by the value of a tensor",
            where=user_frame(error),
            accepted=_GENERAL,
            todo="compute both branches, and choose with torch.where(condition, a, b)",
        )
    for size, made in sizes_by_value.items():
        if re.search(rf"\b{re.escape(size)}\b", text):
            return shape_by_value(*made)
    for signs, what, todo in _KINDS:
        if any(sign in text for sign in signs):
            where, called = user_frame(error), library_call(error)
            if called:
                todo = (
                    f"{called} of PyTorch does it: write in its place what you need of it; {todo}"
                )
            return TraceError(
                f"{program} cannot be captured: {what} ({_first_line(error)})",
                where=where,
                accepted=_GENERAL,
                todo=todo,
            )
    if isinstance(error, AttributeError) and isinstance(error.obj, Tensor):
        return TraceError(
            f"{program} cannot be captured: a tensor has no attribute {error.name!r}",
            where=user_frame(error),
            accepted="attributes of torch.Tensor, and those set on parameters and buffers: all "
            "other tensors of a captured step have none of yours",
            todo=f"keep {error.name!r} on a module, or pass it in the batch; if you have not set "
            "it, see first that the loss runs in eager PyTorch",
        )
    # A message such as 'x', of a KeyError, says nothing without its type.
    what = str(error) if isinstance(error, RuntimeError) else text
    return TraceError(
        f"{program} cannot be captured: {what}",
        where=user_frame(error),
        accepted=_GENERAL,
        todo="see first that it runs in eager PyTorch, with this batch",
    )


def scaled_loss() -> CaptureError:
    """Return the error for a loss that is scaled, which `step` would do again or never undo."""
    return CaptureError(
        "the loss is scaled by a GradScaler",
        accepted="a loss as it is",
        todo="leave the scaler out of loss and loop: with float16, a step scales, and skips what "
        "overflows, by update=UpdateOptions(loss_scaling=LossScaling()), of sbp_torch.capture; "
        "bfloat16 needs none of it",
    )


def check_modes() -> None:
    """See that PyTorch is in no mode in which a step is not what it says.

    Raises:
        CaptureError: it is.
    """
    if torch.is_inference_mode_enabled():
        raise CaptureError(
            "a training step is asked for under torch.inference_mode(), which trains nothing",
            accepted="training steps outside of it; step.evaluate(batch) may be inside",
            todo="take the call out of the `with torch.inference_mode()` block, or the decorator",
        )
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "torch.autograd.detect_anomaly() is on, and a step that is captured runs no autograd",
            accepted="steps outside of it",
            todo="leave it out; to find what makes the first bad value, call "
            "loss(model, batch).backward() of eager PyTorch under it",
        )


def value_read(op: str, where: str) -> TraceError:
    """Return the error for a number that the forward or backward phase reads from a tensor."""
    return _at(op, where, *_BY_VALUE)


def shape_by_value(op: str, where: str) -> TraceError:
    """Return the error for an op whose result has another shape by what its arguments hold."""
    return _at(op, where, *_BY_SHAPE)


def _at(op: str, where: str, what: str, todo: str) -> TraceError:
    return TraceError(f"{what} ({op})", where=where, accepted=_GENERAL, todo=todo)


#: Where PyTorch's messages turn to remedies, which are none here.
_REMEDIES = (" - erroring out!", " (unhinted:")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    ends = [at for sign in _REMEDIES if (at := lines[0].find(sign)) >= 0]
    return f"{type(error).__name__}: {lines[0][: min(ends, default=None)]}"
