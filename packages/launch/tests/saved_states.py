"""States on made-up meshes, saved as the processes of a run would save them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sbp_core.boxing import bounds_of, volume
from sbp_core.placement import Placement
from sbp_core.plugins import CheckpointStorage
from sbp_core.runtime import StatePiece
from sbp_core.sbp import B, NdSbp
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.manifest import CheckpointManifest, Metadata
from sbp_launch.checkpoint.places import FOLDER, newest_first
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.steps import step_of
from sbp_launch.checkpoint.writing import commit, write_part

#: Of all dtypes that states have, of no dims, empty, and one that a layout cannot halve.
STATES: Mapping[str, Tensor] = {
    "weight": torch.arange(60.0).reshape(6, 10),
    "half": torch.arange(15.0, dtype=torch.bfloat16).reshape(5, 3),
    "rows": torch.arange(24, dtype=torch.int64).reshape(4, 3, 2),
    "mask": torch.tensor([True, False, True]),
    "phase": torch.arange(6.0).to(torch.complex128),
    "step": torch.tensor(7.0, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
}


def pieces_of(
    states: Mapping[str, Tensor], mesh: Placement, sbp: NdSbp
) -> dict[int, list[StatePiece]]:
    """Return what each rank owns: the first that holds a slice; what is too small is not split."""
    found: dict[int, list[StatePiece]] = {rank: [] for rank in mesh.rank_list}
    for name, value in states.items():
        shape = tuple(value.shape)
        fits = all(axis.dim < len(shape) for axis in sbp if hasattr(axis, "dim"))
        whole = {mesh.rank_list[0]: tuple((0, extent) for extent in shape)}
        taken = set()
        for rank, bounds in (bounds_of(shape, mesh, sbp) if fits else whole).items():
            if bounds in taken or (value.numel() and not volume(bounds)):
                continue
            taken.add(bounds)
            part = value[tuple(slice(*dim) for dim in bounds)]
            found[rank].append(
                StatePiece(
                    name=name,
                    shape=shape,
                    dtype=str(value.dtype).removeprefix("torch."),
                    bounds=bounds,
                    value=part,
                )
            )
    return found


def save(
    storage: CheckpointStorage,
    name: str,
    pieces: Mapping[int, list[StatePiece]],
    metadata: Metadata | None = None,
) -> CheckpointManifest:
    """Save as one process a rank."""
    staged = storage.stage(name)
    metadata = metadata or Metadata(step=step_of(name) or 1, seed=0)
    for rank, owned in pieces.items():
        write_part(staged, rank, metadata, owned)
    return commit(staged, list(pieces))


def save_whole(root: Path, name: str, states: Mapping[str, Tensor] = STATES) -> Checkpoint:
    """Save as one process with one rank, and open what was saved."""
    storage = LocalStorage(root)
    save(storage, name, pieces_of(states, Placement([0], ("rank",)), NdSbp(B)))
    return Checkpoint(storage, name)


def states_of_run(folder: Path) -> dict[str, Tensor]:
    """Return the states that a run has left in its folder: none, or those of the last step."""
    storage = LocalStorage(folder / FOLDER)
    for name in newest_first(storage):
        with Checkpoint(storage, name) as checkpoint:
            return dict(checkpoint)
    return {}
