"""What lies at a path: a checkpoint, a run with some, or weights in a format of others.

`look` says it, and where the tensors lie, without torch; `open_tensors` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError, nearest
from sbp_core.serialize import read_bytes
from sbp_launch.checkpoint.formats.distributed_checkpoint import (
    is_distributed_checkpoint,
    read_distributed_checkpoint,
)
from sbp_launch.checkpoint.formats.hugging_face import INDEX, is_hugging_face, read_hugging_face
from sbp_launch.checkpoint.formats.index import StoredPiece, StoredTensor, TensorIndex
from sbp_launch.checkpoint.formats.safetensors_file import read_safetensors
from sbp_launch.checkpoint.local import MANIFEST_FILE, LocalStorage
from sbp_launch.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    DamagedError,
    Manifest,
    parse_manifest,
)
from sbp_launch.checkpoint.places import FOLDER, newest_first

if TYPE_CHECKING:
    from sbp_launch.checkpoint.formats.indexed import Tensors

#: How our own format is called.
FORMAT = "sbp"

_READERS: Mapping[str, Callable[[Path], TensorIndex]] = {
    "safetensors": read_safetensors,
    "hf": read_hugging_face,
    "dcp": read_distributed_checkpoint,
}

#: What holds pickles, by the ends of names.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

ACCEPTED = (
    "a run folder, a checkpoint (step-...), a file of safetensors, or a folder of Hugging Face or "
    "of torch.distributed.checkpoint"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lies at a path.

    Args:
        format: `sbp`, `safetensors`, `hf` or `dcp`.
        path: Of the file or the folder of one set of tensors.
        others: The names of the older checkpoints beside it, if a folder with several was asked
            for; the newest is taken.
    """

    format: str
    path: Path
    others: tuple[str, ...] = ()


def look(path: Path) -> Found:
    """Return what lies at a path; of a folder of checkpoints the newest one.

    Raises:
        ConfigError: nothing that is known lies there.
    """
    if not path.exists():
        there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, there)
        raise ConfigError(
            f"there is no {path}",
            accepted=ACCEPTED,
            todo=f"did you mean {path.parent / near}?" if near else "name one that is there",
        )
    if path.is_file():
        if path.name == MANIFEST_FILE:
            return Found(format=FORMAT, path=path.parent)
        if path.name == INDEX:
            return Found(format="hf", path=path.parent)
        if path.name.endswith(_PICKLES):
            raise _pickled(path)
        return Found(format="safetensors", path=path)
    if (path / MANIFEST_FILE).is_file():
        return Found(format=FORMAT, path=path)
    storage = checkpoints_of(path)
    if storage is not None:
        newest, *others = newest_first(storage)
        return Found(format=FORMAT, path=Path(storage.place(newest)), others=tuple(others))
    if is_distributed_checkpoint(path):
        return Found(format="dcp", path=path)
    if is_hugging_face(path):
        return Found(format="hf", path=path)
    raise _unknown(path)


def checkpoints_of(path: Path) -> LocalStorage | None:
    """Return the checkpoints of a run folder, or of a folder of checkpoints; None without any."""
    for folder in (path / FOLDER, path):
        storage = LocalStorage(folder)
        if folder.is_dir() and newest_first(storage):
            return storage
    return None


def read_index(found: Found) -> TensorIndex:
    """Return where the tensors lie.

    Raises:
        ConfigError: something is missing or damaged.
    """
    if found.format != FORMAT:
        return _READERS[found.format](found.path)
    return manifest_index(read_folder(found.path), found.path)


def read_folder(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        DamagedError: it is missing or damaged.
    """
    path = folder / MANIFEST_FILE
    data = read_bytes(path, most_bytes=MAX_MANIFEST_BYTES, error=DamagedError)
    return parse_manifest(data, str(path))


def manifest_index(manifest: Manifest, folder: Path) -> TensorIndex:
    """Return where the tensors of a checkpoint lie."""
    return TensorIndex(
        format=FORMAT,
        path=folder,
        folder=folder,
        tensors={
            name: StoredTensor(
                shape=tensor.shape,
                dtype=tensor.dtype,
                pieces=tuple(
                    StoredPiece(file=piece.file, offset=piece.offset, bounds=piece.bounds)
                    for piece in tensor.pieces
                ),
            )
            for name, tensor in manifest.tensors.items()
        },
    )


@contextmanager
def open_tensors(found: Found) -> Iterator[Tensors]:
    """Open the tensors, read when they are asked for; those of checkpoints are verified then.

    Raises:
        ConfigError: something is missing or damaged.
    """
    # Here and not above: what only looks takes no torch.
    from sbp_launch.checkpoint.formats.indexed import IndexedTensors
    from sbp_launch.checkpoint.reading import Checkpoint

    if found.format != FORMAT:
        yield IndexedTensors(read_index(found))
        return
    with Checkpoint(LocalStorage(found.path.parent), found.path.name) as checkpoint:
        yield checkpoint


def _pickled(path: Path) -> ConfigError:
    return ConfigError(
        f"{path.name} is a pickle, which runs code when it is read",
        where=str(path),
        accepted=ACCEPTED,
        todo="if you trust it: safetensors.torch.save_file(torch.load(path, weights_only=True), "
        "'weights.safetensors')",
    )


def _unknown(path: Path) -> ConfigError:
    """Return the error for a folder that holds nothing known; says what is like it."""
    there = sorted(entry.name for entry in path.iterdir())
    pickles = [name for name in there if name.endswith(_PICKLES)]
    if pickles:
        return _pickled(path / pickles[0])
    if (path / FOLDER).is_dir():
        return ConfigError(
            f"no checkpoint of {path} was finished", where=str(path / FOLDER), accepted=ACCEPTED
        )
    files = [name for name in there if name.endswith(".safetensors")]
    folders = [name for name in there if (path / name).is_dir()]
    near = [*files, *(n for n in folders if checkpoints_of(path / n))][:3]
    return ConfigError(
        f"{path} holds no checkpoint",
        accepted=ACCEPTED,
        todo=f"did you mean {' or '.join(str(path / name) for name in near)}?" if near else "",
    )
