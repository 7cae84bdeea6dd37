"""Checkpoints: the states of a run (parameters, buffers, optimizer) in a folder, for any mesh.

    checkpoints/
      step-00000100/
        manifest.json              index of the pieces, and position of the run; written last
        rank-00000.safetensors     the slices of states that each process owns
        rank-00001.safetensors

`manifest` defines the index, `cover` checks that pieces make up a tensor, `writing` writes files
of pieces, and `reading` reads any slice of a tensor from them. `folder_storage` stores checkpoints
in a local folder, `objects` at an address. `formats` are the file formats of other libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_launch.checkpoint.background import BackgroundSave
    from sbp_launch.checkpoint.folder_storage import LocalStorage
    from sbp_launch.checkpoint.manifest import (
        CheckpointManifest,
        DamagedError,
        Metadata,
        SavedFile,
        SavedPiece,
        SavedTensor,
        manifest_bytes,
        parse_manifest,
        read_manifest,
    )
    from sbp_launch.checkpoint.places import find_checkpoints, newest_first, open_checkpoint
    from sbp_launch.checkpoint.reading import Checkpoint
    from sbp_launch.checkpoint.saving import Processes, prune, save
    from sbp_launch.checkpoint.settings import COPY_BYTES
    from sbp_launch.checkpoint.steps import step_name, step_of
    from sbp_launch.checkpoint.writing import commit, write_part

__all__ = [
    "COPY_BYTES",
    "BackgroundSave",
    "Checkpoint",
    "CheckpointManifest",
    "DamagedError",
    "LocalStorage",
    "Metadata",
    "Processes",
    "SavedFile",
    "SavedPiece",
    "SavedTensor",
    "commit",
    "find_checkpoints",
    "manifest_bytes",
    "newest_first",
    "open_checkpoint",
    "parse_manifest",
    "prune",
    "read_manifest",
    "save",
    "step_name",
    "step_of",
    "write_part",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    background="BackgroundSave",
    folder_storage="LocalStorage",
    manifest="CheckpointManifest DamagedError Metadata SavedFile SavedPiece SavedTensor "
    "manifest_bytes parse_manifest read_manifest",
    places="find_checkpoints newest_first open_checkpoint",
    reading="Checkpoint",
    saving="Processes prune save",
    settings="COPY_BYTES",
    steps="step_name step_of",
    writing="commit write_part",
)
