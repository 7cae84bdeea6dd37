"""What a parallel step leaves in a folder: its strategy and plan, and checkpoints, as runs do."""

from __future__ import annotations

from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.graph import graph_hash
from sbp_core.runtime import Session
from sbp_launch.checkpoint.local import LocalStorage
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.places import find_checkpoints, step_name
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.saving import Processes, ReadTogether, save
from sbp_launch.environment import versions
from sbp_launch.parallelize.agreement import Gather
from sbp_launch.plan_output import write_plan
from sbp_launch.planning import Planned
from sbp_launch.world import World


def processes_of(world: World, gather: Gather | None) -> Processes:
    """Return the processes of a step, as checkpoints know them."""
    if gather is None:
        return Processes()

    def texts(text: str) -> list[str]:
        return list(gather("a checkpoint", text).values())

    return Processes(rank=world.rank, ranks=tuple(range(world.size)), gather=texts)


def save_step(
    folder: Path, session: Session, planned: Planned, step: int, seed: int, processes: Processes
) -> None:
    """Save a checkpoint, and beside it strategy and plan; all processes call it.

    Raises:
        RunError: they cannot be written.
    """
    processes.agree(
        lambda: write_plan(folder, planned) if processes.is_first else None,
        "the plan cannot be written",
        str(folder),
    )
    metadata = Metadata(
        step=step, seed=seed, graph_hash=graph_hash(planned.graph), versions=versions()
    )
    save(LocalStorage(folder), step_name(step), metadata, session.pieces(), processes)


def load_step(path: Path, session: Session, seed: int, processes: Processes) -> int:
    """Load the newest checkpoint that a path means; return its step; all processes call it.

    Raises:
        ConfigError: there is none, it is damaged, does not fit, or was saved with another seed. Of
            several processes, those that have read their parts before one finds the damage have
            lost their states then: the session is closed.
    """
    storage, names = find_checkpoints(path)
    checkpoint = Checkpoint(storage, names[0])
    metadata = checkpoint.manifest.metadata
    if metadata.seed != seed:
        raise ConfigError(
            f"{storage.place(names[0])} was written with seed={metadata.seed}, and this is "
            f"seed={seed}",
            todo=f"pass seed={metadata.seed} to parallelize",
        )
    if len(processes.ranks) == 1:
        with checkpoint:
            session.load_state_dict(checkpoint)
        return metadata.step
    states = ReadTogether(checkpoint)
    session.load_state_dict(states)
    problem = states.agree(processes)
    if problem is not None:
        session.close()
        raise problem
    return metadata.step
