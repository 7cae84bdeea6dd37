"""Storage of checkpoints in a local folder, or in a folder of a disk that hosts share.

    checkpoints/
      .step-00000200.part/     being written
      step-00000100/           committed: renamed after all of it was on the disk
      .step-00000100.old/      the folder that it replaced, if a kill prevented its removal
      .step-00000050.gone/     being removed
      .lock                    held by the run that writes here

A rename commits a checkpoint. Folders are synced before and after it, so after a power cut either
the former folder or the new one exists. Symbolic links in this folder are not followed; a link with
one of the names above is removed. A folder that is not a checkpoint is never replaced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from sbp_core.errors import ConfigError
from sbp_core.plugins import StagedFolder, StorageFactory
from sbp_core.serialize import open_file
from sbp_launch.checkpoint.durable_files import DirectFile, sync

#: The file that marks a folder as committed.
MANIFEST_FILE = "manifest.json"

_LOCK = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStorageConfig:
    """Settings of the storage `local`: `folder` is relative to the run folder, or absolute."""

    folder: str = "checkpoints"

    def __post_init__(self) -> None:
        if not self.folder or "\0" in self.folder:
            raise ConfigError(f"folder={self.folder!r} is no path", accepted="a path of a folder")


def build_local(config: LocalStorageConfig) -> StorageFactory:
    """Return a function from a run folder to its `LocalStorage`."""
    return lambda run_folder: LocalStorage(run_folder / config.folder)


class LocalStorage:
    """Checkpoints as subfolders of a folder.

    Args:
        root: The folder. It is created once, by `claim` or before the first file is written. If it
            disappears later, as with a disk that is unmounted, writing fails.
    """

    def __init__(self, root: Path) -> None:
        self.root, self._was_made = root, False

    def names(self) -> Sequence[str]:
        """Return the names of committed checkpoints."""
        there = [path.name for path in self.root.glob("*") if _is_folder(path)]
        found = {name for name in there if not name.startswith(".")}
        found |= {name[1:-4] for name in there if re.fullmatch(r"\..*\.old", name)}
        return sorted(name for name in found if (self._path(name) / MANIFEST_FILE).exists())

    def sizes(self, name: str) -> Mapping[str, int]:
        """Return the bytes of each file."""
        with os.scandir(self._path(name)) as entries:
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a regular file of a checkpoint; links and devices are refused."""
        return cast(BinaryIO, open_file(self._path(name) / file, follow=False))

    def stage(self, name: str) -> StagedFolder:
        """Return a folder to write to, for a new checkpoint or to replace a committed one."""
        return _StagedLocal(self, name)

    def make(self) -> None:
        """Create the folder on the first call; later, check that it still exists.

        Raises:
            OSError: it cannot be created, or no longer exists.
        """
        if not self._was_made:
            new = [path for path in (self.root, *self.root.parents) if not path.exists()]
            self.root.mkdir(parents=True, exist_ok=True)
            for path in new:
                sync(path.parent)
            self._was_made = True
        elif not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder no longer exists", str(self.root))

    def remove(self, name: str) -> None:
        """Remove a checkpoint; a rename makes the removal atomic."""
        gone = self.root / f".{name}.gone"
        _remove(gone)
        self._path(name).rename(gone)
        sync(self.root)
        shutil.rmtree(gone)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the lock of this folder, and remove the remains of unfinished operations.

        At the end, the folder is removed if this call created it and nothing was saved.
        """
        is_new = not self.root.exists()
        try:
            self.make()
            lock = self._hold()
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {self.root}: {error.strerror or error}",
                accepted="a folder that exists or can be created, with free space",
                todo="name another folder",
            ) from error
        try:
            for path in self.root.glob(".step-*"):
                committed = self.root / path.name[1:].removesuffix(".old")
                is_old = path.suffix == ".old" and _is_folder(path)
                if is_old and not os.path.lexists(committed):
                    path.rename(committed)  # the process was killed between two renames
                elif path.suffix in (".part", ".old", ".gone"):
                    _remove(path)
            yield
        finally:
            with suppress(OSError):
                if is_new and [path.name for path in self.root.iterdir()] == [_LOCK]:
                    (self.root / _LOCK).unlink()
                    self.root.rmdir()
                    self._was_made = False
            os.close(lock)

    def _hold(self) -> int:
        """Take the lock of this folder; return its file descriptor.

        Raises:
            OSError: the lock file cannot be created.
            ConfigError: another process holds the lock.
        """
        path = self.root / _LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            if path.is_symlink():
                path.unlink()
            lock = os.open(path, flags, 0o644)
            try:
                _lock(lock, self.root)
                # The former holder may have removed the file after it was opened here.
                if path.exists() and os.path.samestat(path.stat(), os.fstat(lock)):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            self.root.mkdir(parents=True, exist_ok=True)

    def place(self, name: str = "", file: str = "") -> str:
        """Return the path."""
        return str((self._path(name) if name else self.root) / file)

    def _path(self, name: str) -> Path:
        """Return the path of a committed folder: during a replacement, its `.old` path."""
        path, aside = self.root / name, self.root / f".{name}.old"
        return aside if _is_folder(aside) and not path.is_dir() else path


class _StagedLocal:
    """A folder that is renamed when all of its files are on the disk."""

    def __init__(self, storage: LocalStorage, name: str) -> None:
        self.storage, self.root, self.name = storage, storage.root, name
        self.path = self.root / f".{name}.part"

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """Write a file, and sync it.

        Raises:
            OSError: it cannot be written, or the final name is taken by something that is no
                checkpoint.
        """
        self.storage.make()
        target = self.root / self.name
        if os.path.lexists(target) and not _is_own(target):
            raise FileExistsError(
                errno.EEXIST, "it exists, is not a checkpoint, and is not replaced", str(target)
            )
        if self.path.is_symlink():
            self.path.unlink()
        self.path.mkdir(exist_ok=True)
        path = self.path / file
        path.unlink(missing_ok=True)
        try:
            with DirectFile(path) as opened:
                yield opened
                opened.flush()
                os.fsync(opened.fileno())
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def open(self, file: str) -> BinaryIO:
        """Open a file."""
        return cast(BinaryIO, open_file(self.path / file, follow=False))

    def commit(self, last_file: str, data: bytes, files: Collection[str]) -> None:
        """Sync everything, and rename the folder."""
        with self.create(last_file) as file:
            file.write(data)
        for path in self.path.iterdir():
            if path.name != last_file and path.name not in files:
                path.unlink()
        sync(self.path)
        target, aside = self.root / self.name, self.root / f".{self.name}.old"
        if os.path.lexists(target):
            _remove(aside)
            target.rename(aside)
        self.path.rename(target)
        sync(self.root)
        _remove(aside)

    def discard(self) -> None:
        """Remove the folder."""
        _remove(self.path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_own(path: Path) -> bool:
    """Whether a folder is a committed checkpoint, or the remains of one after a kill."""
    if not _is_folder(path):
        return False
    with os.scandir(path) as entries:
        files = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    is_left = all(name.endswith(".safetensors") for name in files)
    return all(files.values()) and (MANIFEST_FILE in files or is_left)


def _remove(path: Path) -> None:
    """Remove a folder as far as possible; remove a link itself, not its target."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _lock(descriptor: int, root: Path) -> None:
    """Take the lock, and write the holder's process id and host into the file.

    Raises:
        ConfigError: another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
        raise ConfigError(
            f"another run writes its checkpoints to {root}: {holder or 'it is not known which'}",
            accepted="a folder that no running run writes to",
            todo="wait for it, stop it, or name another folder: hydra.run.dir=FOLDER",
        ) from error
    except OSError:
        return  # a file system without locks: continue unprotected
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on host {os.uname().nodename}\n".encode(), 0)
