"""What is said of a program that cannot be captured: why, at which line, and what to change.

The line is one of the user's code, past the frames of torch and this package.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor

from sbp_core.errors import CaptureError, SbpError
from sbp_torch._torch_compat import OpOverload, base_name

_OURS = Path(__file__).parent.parent
_FOREIGN = (str(Path(torch.__file__).parent), str(_OURS), "<")

#: Programs for tests are written as users write theirs.
_PROGRAMS = str(_OURS / "testing")

#: Where Python's own library lies; what is installed may lie in a folder below.
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")

#: Where PyTorch computes in Python what users could.
_WRITTEN_OUT = tuple(
    str(Path(torch.__file__).parent / part)
    for part in ("functional.py", "nn/functional.py", "nn/utils", "distributions")
)

#: What PyTorch calls for every op: the line of interest is the one that called the op.
_HANDLERS = ("__torch_function__", "__torch_dispatch__")


def is_users(code: CodeType) -> bool:
    """Whether code is the user's: not torch's, Python's or ours, nor made at run time."""
    return _is_users(code.co_filename, code.co_name)


@lru_cache(maxsize=4096)
def _is_users(file: str, name: str) -> bool:
    if name in _HANDLERS:
        return False
    if file.startswith(_FOREIGN) and not file.startswith(_PROGRAMS):
        return False
    return not file.startswith(_STANDARD) or any(folder in file for folder in _INSTALLED)


def user_line() -> str:
    """Return `file:line` of the innermost frame of the user's code that runs now; or nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_frame(error: BaseException) -> str:
    """Return `file:line` of the deepest frame of the user's code in a traceback; or nothing."""
    frames = [(code, line) for code, line in _frames(error) if is_users(code)]
    return f"{short(frames[-1][0].co_filename)}:{frames[-1][1]}" if frames else ""


def library_call(error: BaseException) -> str:
    """Return the function of PyTorch that the user called and that raised, `f (FILE:LINE)`.

    Only functions that are written in Python and compute something; else nothing.
    """
    found = ""
    for code, line in _frames(error):
        if is_users(code):
            found = ""
        elif code.co_filename.startswith(_WRITTEN_OUT) and code.co_name != "forward":
            found = f"{code.co_name} ({short(code.co_filename)}:{line})"
    return found


def _frames(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    """Yield the code and line of each frame in a traceback, the deepest last."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code, trace.tb_lineno
        trace = trace.tb_next


def definition(kind: type) -> str:
    """Return `file:line` of where a class is written; or nothing, if its text is not at hand."""
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return ""
    return f"{short(file)}:{line}" if file else ""


@lru_cache(maxsize=4096)
def short(path: str) -> str:
    """Return a path without the folders that only this machine has."""
    parts = Path(path).parts
    for marker in ("site-packages", "src"):
        if marker in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(marker) :])
    return "/".join(parts[-2:])


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
            *("GuardOnDataDependentSymNode", "DataDependentOutputException"),
            *("_local_scalar_dense", "trying to get value out of a tracing tensor"),
        ),
        *_BY_VALUE,
    ),
    (("DynamicOutputShapeException", "nonzero", "unbacked"), *_BY_SHAPE),
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


def written_outside(op: OpOverload, where: str) -> CaptureError:
    """Return the error for a write to what is no state, no input, and not made by the step."""
    return CaptureError(
        f"{base_name(op)} changes a tensor in place that is no parameter, buffer or input, and "
        "outlives the step",
        where=where,
        accepted="in-place changes of buffers, and of tensors that the step makes",
        todo="register the tensor with register_buffer, or change a copy: .clone()",
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
    return TraceError(f"{_BY_VALUE[0]} ({op})", where=where, accepted=_GENERAL, todo=_BY_VALUE[1])


def shape_by_value(op: str, where: str) -> TraceError:
    """Return the error for an op whose result has another shape by what its arguments hold."""
    return TraceError(f"{_BY_SHAPE[0]} ({op})", where=where, accepted=_GENERAL, todo=_BY_SHAPE[1])


#: Where PyTorch's messages turn to remedies, which are none here.
_REMEDIES = (" - erroring out!", " (unhinted:")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    ends = [at for sign in _REMEDIES if (at := lines[0].find(sign)) >= 0]
    return f"{type(error).__name__}: {lines[0][: min(ends, default=None)]}"
