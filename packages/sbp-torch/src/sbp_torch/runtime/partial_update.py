"""States that new values overwrite, and what is said when a step failed in between."""

from __future__ import annotations

from torch import Tensor

from sbp_core.errors import RunError

Number = float | int

#: What to do when a step has failed after the first state was overwritten.
PARTIAL_UPDATE_TODO = (
    "some states are overwritten already (CompileOptions.in_place_states): start a new session "
    "from a checkpoint"
)


def overwrite(old: Tensor | Number, new: Tensor | Number) -> None:
    """Copy the new value of a state into the memory of the old one, if it is not there yet."""
    assert isinstance(old, Tensor) and isinstance(new, Tensor), "host numbers are not overwritten"
    old.copy_(new)


def partially_updated() -> RunError:
    """Return the error of asking for states that belong to two steps."""
    return RunError(
        "the states belong to two steps: a step failed after it had overwritten some of them",
        accepted="states of sessions without CompileOptions.in_place_states, or of whole steps",
        todo="start a new session from a checkpoint, or load_state_dict() where it still runs",
    )
