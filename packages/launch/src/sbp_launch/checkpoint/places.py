"""Checkpoints by their steps, and where users say that they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError
from sbp_core.plugins import Storage
from sbp_core.user_paths import user_path
from sbp_launch.checkpoint.local import MANIFEST_FILE, LocalStorage
from sbp_launch.checkpoint.objects import FsspecStorage
from sbp_launch.checkpoint.steps import step_name, step_of

if TYPE_CHECKING:
    from sbp_launch.checkpoint.reading import Checkpoint

#: `trainer.resume`: the newest checkpoint of the run folder, if there is one.
AUTO = "auto"

#: Folder of a run that has its checkpoints, unless its storage says otherwise.
FOLDER = "checkpoints"


def newest_first(storage: Storage) -> list[str]:
    """Return the checkpoints of a storage, those of the last steps first; none without a place.

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


def find_checkpoints(place: str | Path) -> tuple[Storage, list[str]]:
    """Return the checkpoints that a path or address means, the newest first, and their storage.

    Args:
        place: Of a checkpoint, of a folder of them, or of a run; with `://`, as fsspec has it.

    Raises:
        ConfigError: there is none.
    """
    if "://" in str(place):
        return _find_objects(str(place))
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


def _find_objects(url: str) -> tuple[Storage, list[str]]:
    parent, _, name = url.rstrip("/").rpartition("/")
    if step_of(name) is None:
        storage = FsspecStorage(url)
        names = newest_first(storage)
    else:
        storage = FsspecStorage(parent)
        names = [name] if name in newest_first(storage) else []
    if not names:
        raise ConfigError(
            f"there is no checkpoint at {url}",
            accepted="the address of a folder of checkpoints, or of one",
            todo="leave file:// out of the path of anything else" * url.startswith("file://"),
        )
    return storage, names


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the newest checkpoint that a path means; see `find_checkpoints`.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    # Here and not above: what only looks takes no torch.
    from sbp_launch.checkpoint.reading import Checkpoint

    storage, names = find_checkpoints(path)
    return Checkpoint(storage, names[0])
