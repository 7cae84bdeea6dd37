"""The names of checkpoint folders: from a step to `step-00000100`, and back."""

from __future__ import annotations

import re

_STEP = re.compile(r"step-(\d{8,18})")


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint by its name; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None
