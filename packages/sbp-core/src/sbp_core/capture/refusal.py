"""What is said of a program that cannot be captured: why, at which line, and what to change."""

from __future__ import annotations

from sbp_core.capture.sources import user_frame
from sbp_core.errors import CaptureError, SbpError

_GENERAL = "static shapes, no control flow on tensor values, no in-place change of inputs"

#: What does not hold, and the remedy.
_BY_VALUE = (
    "control flow or a Python number depends on the value of a tensor",
    "choose with torch.where instead of if; keep the value a tensor instead of .item(), bool() or "
    ".tolist()",
)
_BY_SHAPE = (
    "the shape of a tensor depends on the values of another",
    "use static shapes: torch.where or a multiplication by the mask instead of x[mask], "
    "nonzero(), unique() or masked_select()",
)

#: By a part of PyTorch's message or the name of its exception.
_KINDS = (
    (
        ("GuardOnDataDependentSymNode", "DataDependentOutputException", "_local_scalar_dense"),
        *_BY_VALUE,
    ),
    (
        ("DynamicOutputShapeException", "nonzero", "unbacked"),
        *_BY_SHAPE,
    ),
    (
        ("leaf Variable that requires grad", "a leaf variable that requires grad"),
        "a parameter is changed in place during the forward",
        "compute a new tensor from it, or keep what changes in a buffer",
    ),
)


def refusal(program: str, error: Exception) -> CaptureError:
    """Return the error for a program whose trace failed.

    Args:
        program: What it is called.
        error: What the trace raised.
    """
    if isinstance(error, SbpError):  # of the user's own model: it says itself what is accepted
        return CaptureError(
            f"{program} cannot be captured: {error.what}",
            where=(*error.where, user_frame(error)),
            accepted=error.accepted,
            todo=error.todo,
        )
    text = f"{type(error).__name__}: {error}"
    for signs, what, todo in _KINDS:
        if any(sign in text for sign in signs):
            return CaptureError(
                f"{program} cannot be captured: {what} ({_first_line(error)})",
                where=user_frame(error),
                accepted=_GENERAL,
                todo=todo,
            )
    return CaptureError(
        f"{program} cannot be captured: {error}", where=user_frame(error), todo=_GENERAL
    )


def value_read(op: str, where: str) -> CaptureError:
    """Return the error for a number that the forward or backward phase reads from a tensor."""
    return _at(op, where, *_BY_VALUE)


def shape_by_value(op: str, where: str) -> CaptureError:
    """Return the error for an op whose result has another shape by what its arguments hold."""
    return _at(op, where, *_BY_SHAPE)


def _at(op: str, where: str, what: str, todo: str) -> CaptureError:
    return CaptureError(f"{what} ({op})", where=where, accepted=_GENERAL, todo=todo)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
