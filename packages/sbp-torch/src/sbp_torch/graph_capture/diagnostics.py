"""Errors for programs that cannot be captured: the reason, the line, and what to change.

The line is in the user's code, not in torch or this package. PyTorch traces on fake tensors, for
which its operators make fewer checks than for real ones, so this module checks layouts and dtypes.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from sbp_core.errors import CaptureError, SbpError
from sbp_torch._torch_compat import OpOverload, base_name

_OURS = Path(__file__).parent.parent
_FOREIGN = (str(Path(torch.__file__).parent), str(_OURS), "<")

#: Programs for tests count as user code.
_PROGRAMS = str(_OURS / "testing")

#: The folder of Python's own library; installed packages may be in a folder below.
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")

#: The files of PyTorch with functions in Python that compute with operators, as user code does.
_WRITTEN_OUT = tuple(
    str(Path(torch.__file__).parent / part)
    for part in ("functional.py", "nn/functional.py", "nn/utils", "distributions")
)

#: Files that PyTorch calls for every op: the line to report is the one that called the op.
_HANDLERS = ("__torch_function__", "__torch_dispatch__")


def is_users(code: CodeType) -> bool:
    """Whether code belongs to the user, not to torch, Python or us, and not generated."""
    return _is_users(code.co_filename, code.co_name)


@lru_cache(maxsize=4096)
def _is_users(file: str, name: str) -> bool:
    if name in _HANDLERS:
        return False
    if file.startswith(_FOREIGN) and not file.startswith(_PROGRAMS):
        return False
    return not file.startswith(_STANDARD) or any(folder in file for folder in _INSTALLED)


def user_line() -> str:
    """Return `file:line` of the innermost running frame of the user's code, or ""."""
    frames = ((frame.f_code, line) for frame, line in walk_stack(sys._getframe(1)))
    users = (f"{short(code.co_filename)}:{line}" for code, line in frames if is_users(code))
    return next(users, "")


def user_frame(error: BaseException) -> str:
    """Return `file:line` of the deepest frame of the user's code in a traceback, or ""."""
    frames = [one for one in walk_tb(error.__traceback__) if is_users(one[0].f_code)]
    return f"{short(frames[-1][0].f_code.co_filename)}:{frames[-1][1]}" if frames else ""


def library_call(error: BaseException) -> str:
    """Return the function of PyTorch that the user called and that raised, `f (FILE:LINE)`.

    Only functions that are written in Python and compute something count; otherwise return "".
    """
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        if is_users(code):
            found = ""
        elif code.co_filename.startswith(_WRITTEN_OUT) and code.co_name != "forward":
            found = f"{code.co_name} ({short(code.co_filename)}:{line})"
    return found


def definition(kind: type) -> str:
    """Return `file:line` of the definition of a class, or "" if its source is not available."""
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return ""
    return f"{short(file)}:{line}" if file else ""


@lru_cache(maxsize=4096)
def short(path: str) -> str:
    """Return a path without the folders that are specific to this machine."""
    parts = Path(path).parts
    for marker in ("site-packages", "src"):
        if marker in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(marker) :])
    return "/".join(parts[-2:])


_GENERAL = "static shapes, no control flow on tensor values, no in-place change of inputs"

#: The violated requirement, and the remedy.
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

#: The same, by a part of PyTorch's message or the name of its exception.
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
    """A trace that failed in the user's code, which may succeed under `is_compiling()`."""


def refusal(
    program: str, error: Exception, sizes_by_value: Mapping[str, tuple[str, str]]
) -> TraceError:
    """Return the error for a program whose trace failed.

    Args:
        program: Name of the program.
        error: The error of the trace.
        sizes_by_value: The op and the line that made a size, by the name in PyTorch's messages.
    """
    if isinstance(error, SbpError):  # raised by the user's model: it names what is accepted
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
                    f"{called} of PyTorch does this; replace it by the operations you need: {todo}"
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
            accepted="attributes of torch.Tensor, and attributes that you set on parameters and "
            "buffers: other tensors of a captured step do not keep them",
            todo=f"keep {error.name!r} on a module, or pass it in the batch; if you have not set "
            "it, see first that the loss runs in eager PyTorch",
        )
    # A message such as 'x', of a KeyError, is unclear without its type.
    what = str(error) if isinstance(error, RuntimeError) else text
    return TraceError(
        f"{program} cannot be captured: {what}",
        where=user_frame(error),
        accepted=_GENERAL,
        todo="see first that it runs in eager PyTorch, with this batch",
    )


def scaled_loss() -> CaptureError:
    """Return the error for a scaled loss: `step` would scale it twice, or never unscale."""
    return CaptureError(
        "the loss is scaled by a GradScaler",
        accepted="a loss that is not scaled",
        todo="leave the scaler out of loss and loop: with float16, a step scales, and skips what "
        "overflows, by update=UpdateOptions(loss_scaling=LossScaling()), of sbp_torch; "
        "bfloat16 needs none of it",
    )


def written_outside(op: OpOverload, where: str) -> CaptureError:
    """Return the error for a write to a tensor that is no state or input, nor made by the step."""
    return CaptureError(
        f"{base_name(op)} changes a tensor in place that is no parameter, buffer or input, and "
        "outlives the step",
        where=where,
        accepted="in-place changes of buffers, and of tensors that the step makes",
        todo="register the tensor with register_buffer, or change a copy: .clone()",
    )


def check_modes() -> None:
    """Check that PyTorch is in no mode that would change the captured step.

    Raises:
        CaptureError: such a mode is active.
    """
    if torch.is_inference_mode_enabled():
        raise CaptureError(
            "a training step was called under torch.inference_mode(), which has no gradients",
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
    """Return the error for an op whose output shape depends on values of its arguments."""
    return TraceError(f"{_BY_SHAPE[0]} ({op})", where=where, accepted=_GENERAL, todo=_BY_SHAPE[1])


#: The parts of PyTorch's messages that begin remedies, which do not apply here.
_REMEDIES = (" - erroring out!", " (unhinted:")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    ends = [at for sign in _REMEDIES if (at := lines[0].find(sign)) >= 0]
    return f"{type(error).__name__}: {lines[0][: min(ends, default=None)]}"


_DENSE = "dense tensors, of torch.strided"

#: Operators that take tensors of one dtype, except indices.
_OF_ONE_DTYPE = {
    *("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::linear"),
    *("aten::mv", "aten::addmv", "aten::dot", "aten::vdot", "aten::convolution"),
    *("aten::index_put", "aten::index_add", "aten::index_copy", "aten::linalg_cross"),
    *("aten::binary_cross_entropy", "aten::nll_loss_forward", "aten::nll_loss2d_forward"),
    *("aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::_cdist_forward"),
}

#: Operators with parameters of the dtype of their input, or float32 if that has fewer bits.
_OF_WIDER_PARAMETERS = {
    *("aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"),
    *("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional"),
}

#: Arguments whose dtype is independent of the other arguments.
_INDICES = ("indices", "index", "target")

_CLASSES = (torch.int64, torch.uint8)


def check_dense(name: str, tensor: Tensor, *, of: str, todo: str) -> None:
    """Check that a tensor is dense.

    Raises:
        CaptureError: the tensor is sparse, or has another layout.
    """
    if tensor.layout is not torch.strided:
        told = f"the {of}" if name == of else f"{name!r} of the {of}"
        raise CaptureError(f"{told} is of layout {tensor.layout}", accepted=_DENSE, todo=todo)


def check_call(node: fx.Node, where: str) -> None:
    """Check that a captured call makes dense tensors, and has dtypes that its kernel accepts.

    Raises:
        CaptureError: a tensor is not dense, or the kernel does not accept the dtypes.
    """
    for made in tree_leaves(node.meta.get("val")):
        if isinstance(made, Tensor) and made.layout is not torch.strided:
            raise CaptureError(
                f"{node.target} makes a tensor of layout {made.layout}",
                where=where,
                accepted=f"{_DENSE}; gradients, too",
                todo="leave out sparse=True of nn.Embedding and nn.EmbeddingBag: SGD and AdamW "
                "take the dense gradient; make other tensors dense: .to_dense()",
            )
    op = node.target
    kind = op._schema.name if isinstance(op, OpOverload) else ""
    if not isinstance(op, OpOverload) or kind not in _OF_ONE_DTYPE | _OF_WIDER_PARAMETERS:
        return
    given = dict(zip((one.name for one in op._schema.arguments), node.args, strict=False))
    dtypes = {
        name: tensor.dtype
        for name, value in given.items()
        if isinstance(value, fx.Node)
        for tensor in tree_leaves(value.meta.get("val"))
        if isinstance(tensor, Tensor)
    }
    indices = _INDICES if kind != "aten::binary_cross_entropy" else ()
    taken = {name: dtype for name, dtype in dtypes.items() if name not in indices}
    first, target = next(iter(taken.values()), None), dtypes.get("target")
    wider = kind in _OF_WIDER_PARAMETERS and first in (torch.bfloat16, torch.float16)
    is_mixed = len(set(taken.values()) - ({torch.float32} if wider else set())) > 1
    accepted, remedy = "tensors of one dtype", ".float()"
    if "nll_loss" in kind and target is not None and target not in _CLASSES:
        taken, is_mixed = {"target": target}, True
        accepted, remedy = "classes of dtype int64", ".long()"
    if is_mixed:
        told = (f"{name} of {str(one).removeprefix('torch.')}" for name, one in taken.items())
        raise CaptureError(
            f"{op} is called with {', '.join(told)}",
            where=where,
            accepted=accepted,
            todo=f"convert the entry of the batch, such as by {remedy}, or the model: "
            "model.to(dtype)",
        )
