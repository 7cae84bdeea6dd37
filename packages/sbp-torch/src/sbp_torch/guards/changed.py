"""What a guard says of a change, and when a value is what it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sbp_torch.capture.side_effects import content_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

#: Containers of more entries are compared by their length.
MOST_ENTRIES = 10_000

ANEW = (
    "go on with a new step: step.copy_to(model, optimizer), end the `with` block, and call "
    "parallelize again with the program as it is now"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What is not as it was when the step was captured.

    Args:
        what: A sentence.
        where: The user's line that reads it, as `file:line`; or "".
        todo: The way out.
        is_structure: Whether modules, parameters or buffers are others.
    """

    what: str
    where: str = ""
    todo: str = ANEW
    is_structure: bool = False


class _Nothing:
    def __repr__(self) -> str:
        return "not there"


NOTHING: Any = _Nothing()


def held_in(value: Any) -> Any:
    """Return a copy of what a container holds, or the length of one that holds very much."""
    try:
        if len(value) > MOST_ENTRIES and not hasattr(value, "tobytes"):
            return {"": len(value)} if isinstance(value, dict | list | tuple | set) else None
    except TypeError:
        pass
    return content_of(value)


def is_same(before: Any, after: Any) -> bool:
    """Whether a value is what it was: itself, or an equal number, string, or container of such."""
    if before is after:
        return True
    if isinstance(before, Tensor | nn.Module) or type(before) is not type(after):
        return False
    if isinstance(before, PLAIN):
        return repr(before) == repr(after)  # nan is nan, and 0.0 is not -0.0
    old, new = held_in(before), held_in(after)
    if old is None or new is None:
        return False
    if isinstance(old, dict):
        return list(old) == list(new) and all(is_same(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(map(is_same, old, new))
    return bool(old == new)


def short(value: object) -> str:
    """Return what messages show of a value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
