"""Overwrite states in place, and report steps that failed after some states were overwritten.

A step that fails before its commit (`sbp_core.compile.commit`) leaves all states unchanged. A step
that fails after it leaves states of two steps, on that rank or between ranks. The error message of
the rank contains this fact, so processes of other ranks, which get the message, know it, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sbp_core.errors import RunError
from sbp_core.runtime import Number

_AFTER_COMMIT = "failed after the commit of step"


def overwrite(old: Tensor | Number, new: Tensor | Number) -> None:
    """Copy the new value of a state into the memory of the old value, unless it is there."""
    assert isinstance(old, Tensor) and isinstance(new, Tensor), "host numbers are not overwritten"
    if new is not old:
        old.copy_(new)


def step_failure(
    rank: int,
    step: int,
    actor: str,
    error: BaseException,
    *,
    is_partial: bool,
    where: Sequence[str] = (),
) -> RunError:
    """Return the error of a step in which a rank failed.

    Args:
        rank: The rank.
        step: The number of the step, from 0.
        actor: The actor that failed.
        error: The error; it becomes the cause.
        is_partial: Whether some states are overwritten already, here or on another rank.
        where: More about the place.
    """
    failed = f"{_AFTER_COMMIT} {step}" if is_partial else "failed"
    todo = "states are those from before the step: state_dict() still gives them"
    if is_partial:
        todo = (
            "some states are overwritten already: start a new session from a checkpoint (with "
            "compile.in_place_states=false, new states are put in force when a step is done)"
        )
    made = RunError(f"rank {rank} {failed} in actor {actor!r}: {error}", where=where, todo=todo)
    made.__cause__ = error
    return made


def step_interrupted(rank: int, step: int, error: BaseException, is_partial: bool) -> RunError:
    """Return the error for a step that was interrupted from outside, such as by Ctrl-C.

    Args:
        rank: The first rank of the process.
        step: The number of the step, from 0.
        error: The exception that interrupted it.
        is_partial: Whether some states are overwritten already.
    """
    if is_partial:
        return RunError(f"rank {rank} {_AFTER_COMMIT} {step}: it was interrupted by {error!r}")
    return RunError(f"step {step} was interrupted by {error!r}")


def tells_of_partial_update(words: str) -> bool:
    """Whether the error message of any rank reports a failure after the commit."""
    return _AFTER_COMMIT in words


def partially_updated(reason: str = "") -> RunError:
    """Return the error for a read of states that belong to two steps.

    Args:
        reason: The failure, if it is known.
    """
    return RunError(
        "the states belong to two steps: a step failed after it had overwritten some of them",
        where=reason,
        accepted="states of whole steps",
        todo="start a new session from a checkpoint, or load_state_dict() where it still runs",
    )
