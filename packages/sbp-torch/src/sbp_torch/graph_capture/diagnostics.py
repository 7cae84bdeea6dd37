"""What is said of a program that cannot be captured: why, at which line, and what to change.

The line is one of the user's code, past the frames of torch and this package. PyTorch runs a
capture on tensors without data, for which its operators do not check all that they check in the
first step: so layouts and dtypes are checked here.
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

#: Programs for tests are written as users write theirs.
_PROGRAMS = str(_OURS / "testing")

#: Where Python's own library lies; what is installed may be in a folder below.
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
    frames = ((frame.f_code, line) for frame, line in walk_stack(sys._getframe(1)))
    users = (f"{short(code.co_filename)}:{line}" for code, line in frames if is_users(code))
    return next(users, "")


def user_frame(error: BaseException) -> str:
    """Return `file:line` of the deepest frame of the user's code in a traceback; or nothing."""
    frames = [one for one in walk_tb(error.__traceback__) if is_users(one[0].f_code)]
    return f"{short(frames[-1][0].f_code.co_filename)}:{frames[-1][1]}" if frames else ""


def library_call(error: BaseException) -> str:
    """Return the function of PyTorch that the user called and that raised, `f (FILE:LINE)`.

    Only functions that are written in Python and compute something; else nothing.
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
        "overflows, by update=UpdateOptions(loss_scaling=LossScaling()), of sbp_torch; "
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
    """Check that PyTorch is in no mode that would change the captured step.

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


_DENSE = "dense tensors, of torch.strided"

#: What takes tensors of one dtype, but for indices.
_OF_ONE_DTYPE = {
    *("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::linear"),
    *("aten::mv", "aten::addmv", "aten::dot", "aten::vdot", "aten::convolution"),
    *("aten::index_put", "aten::index_add", "aten::index_copy", "aten::linalg_cross"),
    *("aten::binary_cross_entropy", "aten::nll_loss_forward", "aten::nll_loss2d_forward"),
    *("aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::_cdist_forward"),
}

#: What takes parameters of the dtype of its input; or of float32 if the input has fewer bits.
_OF_WIDER_PARAMETERS = {
    *("aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"),
    *("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional"),
}

#: Arguments that have a dtype of their own.
_INDICES = ("indices", "index", "target")

_CLASSES = (torch.int64, torch.uint8)


def check_dense(name: str, tensor: Tensor, *, of: str, todo: str) -> None:
    """See that a tensor is dense.

    Raises:
        CaptureError: it is sparse, or of another layout.
    """
    if tensor.layout is not torch.strided:
        told = f"the {of}" if name == of else f"{name!r} of the {of}"
        raise CaptureError(f"{told} is of layout {tensor.layout}", accepted=_DENSE, todo=todo)


def check_call(node: fx.Node, where: str) -> None:
    """See that a captured call makes dense tensors, of dtypes that its kernel takes.

    Raises:
        CaptureError: it does not.
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
