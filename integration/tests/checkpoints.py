"""What a run has saved, as tests read it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sbp_launch.checkpoint import open_checkpoint


def saved_states(folder: Path) -> dict[str, Tensor]:
    """Return the states of the newest checkpoint in the folder of a run, verified."""
    with open_checkpoint(folder) as checkpoint:
        return dict(checkpoint)
