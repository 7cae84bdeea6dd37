"""Checkpoints: the states of a run in a folder, from any mesh and for any other.

    checkpoints/
      step-00000100/
        manifest.json              what is where, and where the run was; written last
        rank-00000.safetensors     what each process owns of the states
        rank-00001.safetensors

`manifest` has the values, `cover` checks that pieces make up a tensor, `writing` makes files of
pieces, `reading` cuts any part of a tensor out of them. `local` is a storage in a folder.
`formats` are files of others, in the names of the model.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_launch.checkpoint.local import LocalStorage
    from sbp_launch.checkpoint.manifest import (
        DamagedError,
        Manifest,
        Metadata,
        SavedFile,
        SavedPiece,
        SavedTensor,
        manifest_bytes,
        parse_manifest,
    )
    from sbp_launch.checkpoint.places import open_checkpoint
    from sbp_launch.checkpoint.reading import Checkpoint, read_manifest
    from sbp_launch.checkpoint.writing import commit, write_part

__all__ = [
    "Checkpoint",
    "DamagedError",
    "LocalStorage",
    "Manifest",
    "Metadata",
    "SavedFile",
    "SavedPiece",
    "SavedTensor",
    "commit",
    "manifest_bytes",
    "open_checkpoint",
    "parse_manifest",
    "read_manifest",
    "write_part",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Checkpoint": "reading",
        "DamagedError": "manifest",
        "LocalStorage": "local",
        "Manifest": "manifest",
        "Metadata": "manifest",
        "SavedFile": "manifest",
        "SavedPiece": "manifest",
        "SavedTensor": "manifest",
        "commit": "writing",
        "manifest_bytes": "manifest",
        "open_checkpoint": "places",
        "parse_manifest": "manifest",
        "read_manifest": "reading",
        "write_part": "writing",
    },
)
