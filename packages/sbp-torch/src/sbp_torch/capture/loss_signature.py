"""Whether a loss can be called with a model and a batch, as far as its signature says."""

from __future__ import annotations

import inspect
from functools import partial

from sbp_torch.capture.sources import short


def unfit_signature(loss: object) -> str:
    """Return the signature of a loss that cannot be called with a model and a batch; else nothing.

    Nothing is returned if it cannot be told: of callables that are not written in Python, and of
    those that claim the signature of another function.

    Args:
        loss: A callable.
    """
    function = _function(loss)
    if function is None or hasattr(function, "__signature__") or hasattr(loss, "__signature__"):
        return ""
    # A wrapper may take other arguments than the function that it wraps.
    signature = inspect.signature(loss, follow_wrapped=False)  # type: ignore[arg-type] # a callable
    try:
        signature.bind("model", "batch")
    except TypeError:
        return str(signature)
    return ""


def defined_at(loss: object) -> str:
    """Return `file:line` of where a loss is written; nothing if it is not written in Python."""
    function = _function(loss)
    if not inspect.isfunction(function):
        return ""
    return f"{short(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


def _function(loss: object) -> object:
    """Return the function of Python that a call of a loss ends in; None if there is none."""
    while type(loss) is partial:
        loss = loss.func
    if not inspect.isroutine(loss) and not inspect.isclass(loss):
        loss = inspect.getattr_static(type(loss), "__call__")
    found = loss.__func__ if inspect.ismethod(loss) else loss
    return found if inspect.isfunction(found) else None
