"""Find checkpoints and weights at a path or an address, and open them.

A place may be a checkpoint, a run with checkpoints, or weights in the format of another library.
`look` detects the format, and `read_index` lists the tensors, both without torch; `open_tensors`
reads them. `sbp-checkpoint` uses this, and so do the settings `resume` and `init_from`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError, nearest
from sbp_core.plugins import CheckpointStorage
from sbp_core.serialize import shown
from sbp_core.user_paths import user_path
from sbp_launch.checkpoint.folder_storage import MANIFEST_FILE, LocalStorage
from sbp_launch.checkpoint.formats.distributed_checkpoint import (
    is_distributed_checkpoint,
    read_distributed_checkpoint,
)
from sbp_launch.checkpoint.formats.index import StoredPiece, StoredTensor, TensorIndex
from sbp_launch.checkpoint.formats.safetensors_file import (
    INDEX,
    is_hugging_face,
    read_hugging_face,
    read_safetensors,
)
from sbp_launch.checkpoint.manifest import CheckpointManifest, read_manifest
from sbp_launch.checkpoint.objects import FsspecStorage
from sbp_launch.checkpoint.steps import step_name, step_of

if TYPE_CHECKING:
    from sbp_launch.checkpoint.reading import Checkpoint
    from sbp_launch.checkpoint.tensors import LazyTensors


#: Value of `trainer.resume`: the newest checkpoint of the run folder, if there is one.
AUTO = "auto"

#: Subfolder of a run folder with its checkpoints, unless the storage sets another.
FOLDER = "checkpoints"


def newest_first(storage: CheckpointStorage) -> list[str]:
    """Return the names of checkpoints in a storage, the newest first.

    Raises:
        ConfigError: they cannot be listed.
    """
    try:
        names = storage.names()
    except OSError as error:
        raise ConfigError(
            f"checkpoints cannot be listed: {error.strerror or error}", where=storage.place()
        ) from error
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def find_checkpoints(place: str | Path) -> tuple[CheckpointStorage, list[str]]:
    """Return the checkpoints at a path or address, the newest first, and their storage.

    Args:
        place: A checkpoint, a folder of checkpoints, or a run folder; an fsspec address if it
            contains `://`.

    Raises:
        ConfigError: there is none.
    """
    if "://" in (url := str(place)):
        parent, _, name = url.rstrip("/").rpartition("/")
        is_one = step_of(name) is not None
        objects = FsspecStorage(parent if is_one else url)
        names = [one for one in newest_first(objects) if not is_one or one == name]
        if not names:
            raise ConfigError(
                f"there is no checkpoint at {url}",
                accepted="the address of a folder of checkpoints, or of one",
                todo="for a path of this machine, leave file:// out" * url.startswith("file://"),
            )
        return objects, names
    path = user_path(place)
    try:
        is_one = (path / MANIFEST_FILE).is_file()
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be read
        what = f"{path} cannot be read: {error.strerror or error}"
        raise ConfigError(what, accepted="the folder of a run or of checkpoints") from error
    if is_one:
        whole = path if path.name not in ("", "..") else path.resolve()
        return LocalStorage(whole.parent), [whole.name]
    for folder in (path, path / FOLDER):
        storage = LocalStorage(folder)
        if names := newest_first(storage):
            return storage, names
    raise ConfigError(
        f"there is no checkpoint in {path}" if is_folder else f"there is no folder {path}",
        accepted="the folder of a run, of checkpoints, or of one: runs/RUN, "
        f"runs/RUN/{FOLDER}, runs/RUN/{FOLDER}/{step_name(100)}",
    )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the newest checkpoint at a path; see `find_checkpoints`.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    # Imported here, because `look` and `read_index` need no torch.
    from sbp_launch.checkpoint.reading import Checkpoint

    storage, names = find_checkpoints(path)
    return Checkpoint(storage, names[0])


#: Name of our own format.
FORMAT = "sbp"

_READERS: Mapping[str, Callable[[Path], TensorIndex]] = {
    "safetensors": read_safetensors,
    "hf": read_hugging_face,
    "dcp": read_distributed_checkpoint,
}

#: Suffixes of files that contain pickles.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

ACCEPTED = (
    "a run folder, a checkpoint (step-...) or its address, a file of safetensors, or a folder of "
    "Hugging Face or of torch.distributed.checkpoint"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTensors:
    """Tensors found at a place, and their format.

    Args:
        format: `sbp`, `safetensors`, `hf` or `dcp`.
        place: Path or address of the file or the folder with the tensors.
        storage: Storage of the checkpoint; None for other formats.
        name: Name of the checkpoint in its storage.
        others: Names of older checkpoints in the same folder, if the place is a folder of several;
            the newest one is taken.
    """

    format: str
    place: str
    storage: CheckpointStorage | None = None
    name: str = ""
    others: tuple[str, ...] = ()


def look(place: str | Path) -> FoundTensors:
    """Detect the format of tensors at a path or an address; in a folder take the newest checkpoint.

    Raises:
        ConfigError: there is nothing, or nothing in a known format.
    """

    def newest(place: str | Path) -> FoundTensors:
        storage, (name, *others) = find_checkpoints(place)
        return replace(found_in(storage, name), others=tuple(others))

    if "://" in str(place):
        return newest(str(place))
    if "\0" not in str(place):  # such a path cannot be opened; the error below quotes it
        place = user_path(place)
    path = Path(place)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            what = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{shown(str(path))} cannot be read: {what}", accepted=ACCEPTED
            ) from error
        there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, there)
        raise ConfigError(
            f"there is no {path}",
            accepted=ACCEPTED,
            todo=f"did you mean {path.parent / near}?" if near else "name a path that exists",
        ) from None
    if not S_ISDIR(mode):
        if not S_ISREG(mode):
            raise ConfigError(f"{path} is neither a file nor a folder", accepted=ACCEPTED)
        if path.name == MANIFEST_FILE:
            return newest(path.parent)
        if path.name == INDEX:
            return FoundTensors(format="hf", place=str(path.parent))
        if path.name.endswith(_PICKLES):
            raise _pickle_error(path)
        return FoundTensors(format="safetensors", place=str(path))
    if (path / MANIFEST_FILE).is_file() or checkpoints_of(path) is not None:
        return newest(path)
    if is_distributed_checkpoint(path):
        return FoundTensors(format="dcp", place=str(path))
    if is_hugging_face(path):
        return FoundTensors(format="hf", place=str(path))
    # A folder with nothing known: the error suggests similar files and folders.
    names = sorted(entry.name for entry in path.iterdir())
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise _pickle_error(path / pickles[0])
    if (path / FOLDER).is_dir():
        raise ConfigError(
            f"no checkpoint of {path} was finished", where=str(path / FOLDER), accepted=ACCEPTED
        )
    files = [name for name in names if name.endswith(".safetensors")]
    folders = (name for name in names if (path / name).is_dir())
    alike = [*files, *(name for name in folders if checkpoints_of(path / name))][:3]
    raise ConfigError(
        f"{path} holds no checkpoint",
        accepted=ACCEPTED,
        todo=f"did you mean {' or '.join(str(path / name) for name in alike)}?" if alike else "",
    )


def found_in(storage: CheckpointStorage, name: str) -> FoundTensors:
    """Describe a checkpoint of a storage."""
    return FoundTensors(format=FORMAT, place=storage.place(name), storage=storage, name=name)


def checkpoints_of(place: str | Path) -> CheckpointStorage | None:
    """Return the storage at a run folder, or a folder or address of checkpoints; None if none."""
    is_one = "://" not in str(place) and (Path(place) / MANIFEST_FILE).is_file()
    if is_one:
        return None
    try:
        storage, names = find_checkpoints(place)
    except ConfigError:
        return None
    # The address of a single checkpoint is not a folder of them.
    return None if storage.place(names[0]) == str(place).rstrip("/") else storage


def read_index(found: FoundTensors) -> TensorIndex:
    """Return the index of the tensors: file, offset and shape of each.

    Raises:
        ConfigError: something is missing or damaged.
    """
    if found.format != FORMAT:
        return _READERS[found.format](Path(found.place))
    return manifest_index(manifest_of(found), found)


def manifest_of(found: FoundTensors) -> CheckpointManifest:
    """Return the manifest of a checkpoint.

    Raises:
        DamagedError: it is missing or damaged.
    """
    assert found.storage is not None, "a checkpoint is in a storage"
    return read_manifest(found.storage, found.name)


def manifest_index(manifest: CheckpointManifest, found: FoundTensors) -> TensorIndex:
    """Return the index of the tensors of a checkpoint."""
    tensors = {
        name: StoredTensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            pieces=tuple(
                StoredPiece(file=one.file, offset=one.offset, bounds=one.bounds)
                for one in tensor.pieces
            ),
        )
        for name, tensor in manifest.tensors.items()
    }
    return TensorIndex(path=Path(found.place), folder=Path(found.place), tensors=tensors)


@contextmanager
def open_tensors(found: FoundTensors) -> Iterator[LazyTensors]:
    """Open tensors that are read on access; reading from a checkpoint verifies its checksums.

    Raises:
        ConfigError: something is missing or damaged.
    """
    # Imported here, because `look` and `read_index` need no torch.
    from sbp_launch.checkpoint.formats.indexed import IndexedTensors
    from sbp_launch.checkpoint.reading import Checkpoint

    if found.storage is None:
        yield IndexedTensors(read_index(found))
        return
    with Checkpoint(found.storage, found.name) as checkpoint:
        yield checkpoint


def _pickle_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path.name} is a pickle, which runs code when it is read",
        where=str(path),
        accepted=ACCEPTED,
        todo="if you trust it: safetensors.torch.save_file(torch.load(path, weights_only=True), "
        "'weights.safetensors')",
    )


def place_of_checkpoint(target: str, step: int | None) -> tuple[CheckpointStorage, str, int]:
    """Return storage, name and step for a checkpoint that will be written.

    Args:
        target: Path or address of the checkpoint, or of the run or the folder to put it in.
        step: Step of the checkpoint; None to take it from `target`.

    Raises:
        ConfigError: `target` names another step.
    """
    parent, _, last = target.rstrip("/").rpartition("/")
    named = step_of(last)
    if named is not None and step not in (None, named):
        raise ConfigError(
            f"{target} is the place of step {named}, and the checkpoint is of step {step}",
            accepted=f"{step_name(step or 0)}, or the folder of a run",
        )
    is_url = "://" in target
    folder = (parent or ("" if is_url else ".")) if named is not None else target
    if is_url:
        storage: CheckpointStorage = FsspecStorage(folder)
    else:
        path = user_path(folder)
        is_run = named is None and path.name != FOLDER
        storage = LocalStorage(path / FOLDER if is_run else path)
    number = step or named or 0
    return storage, last if named is not None else step_name(number), number
