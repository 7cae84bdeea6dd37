"""What a parallel step leaves in a folder: states, strategy, plan, and how many steps were done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from sbp_core.errors import ConfigError, RunError
from sbp_launch.plan_output import write_plan
from sbp_launch.planning import Planned
from sbp_launch.states_file import STATES, StatesFile, write_states

#: File of the steps done and the seed.
PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What was read from a folder.

    Args:
        states: By name; read when they are asked for.
        steps_done: Steps taken.
        seed: Of random numbers in the step.
    """

    states: Mapping[str, Tensor]
    steps_done: int
    seed: int


def write_folder(
    folder: Path, states: Mapping[str, Tensor], planned: Planned, steps_done: int, seed: int
) -> None:
    """Write all files; the states last, which are whole whenever they are there.

    Raises:
        RunError: they cannot be written.
    """
    try:
        write_plan(folder, planned)
        text = json.dumps({"steps_done": steps_done, "seed": seed})
        (folder / PROGRESS).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"the folder {folder} cannot be written: {error.strerror or error}",
            where=str(error.filename or ""),
            todo="make room, or name another folder",
        ) from error
    write_states(folder / STATES, states)


def read_folder(folder: Path) -> Saved:
    """Return what `write_folder` wrote.

    Raises:
        ConfigError: it is not there, or cannot be read.
    """
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        states = StatesFile(folder / STATES)
        return Saved(states=states, steps_done=progress["steps_done"], seed=progress["seed"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be read: {error}",
            accepted=f"a folder that step.save(folder) wrote, with {STATES} and {PROGRESS}",
        ) from error
