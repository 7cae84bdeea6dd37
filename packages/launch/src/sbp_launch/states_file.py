"""The states of a run as a file that is whole whenever it is there, and is read in parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sbp_core.errors import RunError

#: States that can be trained on, and those that a loss without a value has left.
STATES, NOT_FINITE_STATES = "states.safetensors", "states_not_finite.safetensors"


class StatesFile(Mapping[str, Tensor]):
    """The states in a file: each is read when it is asked for; a session reads its ranks' parts.

    Args:
        path: Of the file.

    Raises:
        OSError: there is no such file.
        SafetensorError: it is none of states.
    """

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt")
        names: list[str] = self._file.keys()  # type: ignore[no-untyped-call] # of safetensors
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        whole: Tensor = self._file.get_tensor(name)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # that of `Mapping` reads the tensor

    def like(self, name: str) -> Tensor:
        """Return a tensor of a state's shape and dtype, without its values."""
        shape = self._file.get_slice(name).get_shape()
        first = self.part(name, [(0, min(1, extent)) for extent in shape])
        return torch.empty(shape, dtype=first.dtype, device="meta")

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return a part of a state: (start, stop) of each dim."""
        if not bounds:
            return self[name]
        found: Tensor = self._file.get_slice(name)[tuple(slice(*dim) for dim in bounds)]
        return found


def write_states(path: Path, states: Mapping[str, Tensor]) -> None:
    """Write states aside, see them on the disk, and then put them in the place of `path`.

    Whatever fails, and whenever: `path` is what it was or what it is to be, and nothing else is
    left behind. Only a killed process or machine may leave the file aside, `path` with `.part`
    behind its name.

    Args:
        path: Of the file.
        states: Each by name, of any shape and dtype.

    Raises:
        RunError: it cannot be written, such as on a full disk.
    """
    aside = path.with_name(f"{path.name}.part")
    try:
        try:
            save_file({name: value.contiguous() for name, value in states.items()}, aside)
            _wait_for_disk(aside)
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        _wait_for_disk(path.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{path} cannot be written: {reason(error)}",
            todo="make room, or name a folder elsewhere: hydra.run.dir=FOLDER",
        ) from error


def reason(error: OSError | SafetensorError) -> str:
    """Return why a file cannot be written, without its name."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _wait_for_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a power cut."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) if path.is_dir() else os.O_RDWR
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
