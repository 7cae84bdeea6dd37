"""The names of checkpoints: `step-00000100`."""

from __future__ import annotations

import re

_STEP = re.compile(r"step-(\d{8,18})")


def step_name(step: int) -> str:
    """Return what the checkpoint of a step is called."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint; None if the name is none of a step."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None
