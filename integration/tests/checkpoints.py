"""What a run has saved, as tests read it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sbp_launch.checkpoint import Checkpoint
from sbp_launch.checkpoint.places import find_checkpoints


def saved_states(folder: Path) -> dict[str, Tensor]:
    """Return the states of the newest checkpoint in the folder of a run, verified."""
    storage, names = find_checkpoints(folder)
    with Checkpoint(storage, names[0]) as checkpoint:
        return dict(checkpoint)
