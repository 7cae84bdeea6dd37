"""Tensors of any file as a checkpoint, in one file, read and written part by part."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sbp_core.boxing import Bounds
from sbp_core.errors import ConfigError
from sbp_core.graph import ITEMSIZE
from sbp_core.plugins import Storage
from sbp_core.user_paths import user_path
from sbp_launch.checkpoint.cover import cut
from sbp_launch.checkpoint.local import LocalStorage
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.objects import FsspecStorage
from sbp_launch.checkpoint.places import FOLDER
from sbp_launch.checkpoint.saving import Processes, save
from sbp_launch.checkpoint.steps import step_name, step_of
from sbp_launch.checkpoint.tensors import PART_BYTES, Tensors, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A slice of a tensor, read when its value is asked for."""

    tensors: Tensors
    name: str
    shape: tuple[int, ...]
    dtype: str
    bounds: Bounds

    @property
    def value(self) -> Tensor:
        return self.tensors.part(self.name, self.bounds)


def write_checkpoint(storage: Storage, name: str, tensors: Tensors, metadata: Metadata) -> None:
    """Write tensors as the checkpoint of a run with one process; one of the name is replaced.

    Args:
        storage: Where.
        name: Of its folder.
        tensors: By the names of `Session.state_dict`, of which 64 MiB at a time are in memory.
        metadata: Where the run was.

    Raises:
        ConfigError: one has a dtype that no state has.
        RunError: it cannot be written.
    """
    parts = []
    for own in tensors:
        like = tensors.like(own)
        if dtype_name(like) not in ITEMSIZE:
            raise ConfigError(
                f"{own!r} is {dtype_name(like)}, which no state has", accepted=", ".join(ITEMSIZE)
            )
        shape, dtype = tuple(like.shape), dtype_name(like)
        parts += [
            _Part(tensors=tensors, name=own, shape=shape, dtype=dtype, bounds=bounds)
            for bounds in cut(shape, like.element_size(), PART_BYTES)
        ]
    save(storage, name, metadata, parts, Processes())


def place_of_checkpoint(target: str, step: int | None) -> tuple[Storage, str, int]:
    """Return storage, name and step of a checkpoint that is to be written.

    Args:
        target: Path or address of the checkpoint, or of the run or the folder that is to have it.
        step: That it is of; None if nothing is known of it but what `target` says.

    Raises:
        ConfigError: `target` is called by another step.
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
        storage: Storage = FsspecStorage(folder)
    else:
        path = user_path(folder)
        is_run = named is None and path.name != FOLDER
        storage = LocalStorage(path / FOLDER if is_run else path)
    number = step or named or 0
    return storage, last if named is not None else step_name(number), number
