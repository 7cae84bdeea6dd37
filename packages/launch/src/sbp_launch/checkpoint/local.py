"""A storage in a folder of this machine, or of a disk that hosts share.

    checkpoints/
      .step-00000200.part/     being written
      step-00000100/           committed: it was renamed when all of it was on the disk
      .step-00000100.old/      what it has replaced, if a kill has kept it from being removed
      .lock                    held by the run that writes here

Processes that save together write to one folder, so its name is known beforehand. What has such a
name and is a link is removed as one; what is neither a link nor a folder is left alone.

A rename is the commit, and folders are synced before and after it, so that after a power cut there
is either the former folder or the new one. No link is followed from a folder to a file.
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
from sbp_core.plugins import StagedFolder, Storage, StorageFactory
from sbp_core.serialize import open_file
from sbp_launch.checkpoint.direct import DirectFile

#: The file that makes a folder a committed one.
MANIFEST_FILE = "manifest.json"

_LOCK = ".lock"

#: What is cleared when a run begins.
_BEGUN = re.compile(r"\.step-[^.]+\.(part|old)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStorageConfig:
    """Settings of the storage `local`: `folder` is relative to the run folder, or absolute."""

    folder: str = "checkpoints"

    def __post_init__(self) -> None:
        if not self.folder or "\0" in self.folder:
            raise ConfigError(f"folder={self.folder!r} is no path", accepted="a path of a folder")


def build_local(config: LocalStorageConfig) -> StorageFactory:
    """Return a maker of `LocalStorage`."""

    def make(run_folder: Path) -> Storage:
        return LocalStorage(run_folder / config.folder)

    return make


class LocalStorage:
    """Folders in a folder.

    Args:
        root: Made when it is claimed, or something is staged; once: a disk that has gone away is
            not to be replaced by a folder in its place.
    """

    def __init__(self, root: Path) -> None:
        self.root, self._was_made = root, False

    def names(self) -> Sequence[str]:
        """Return the committed folders."""
        found = {path.name for path in _folders(self.root) if not path.name.startswith(".")}
        found |= {
            path.name[1:].removesuffix(".old")
            for path in _folders(self.root)
            if path.name.startswith(".") and path.name.endswith(".old")
        }
        return sorted(name for name in found if (self._path(name) / MANIFEST_FILE).exists())

    def sizes(self, name: str) -> Mapping[str, int]:
        """Return the bytes of each file."""
        with os.scandir(self._path(name)) as entries:
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file, no link and no device."""
        return _open(self._path(name) / file)

    def stage(self, name: str) -> StagedFolder:
        """Return a folder to write to."""
        return _StagedLocal(self, name)

    def make(self) -> None:
        """Make the folder, the first time.

        Raises:
            OSError: it cannot be made, or it is no longer there.
        """
        if not self._was_made:
            new = [path for path in (self.root, *self.root.parents) if not path.exists()]
            self.root.mkdir(parents=True, exist_ok=True)
            for path in new:
                sync(path.parent)
            self._was_made = True
        elif not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder has gone", str(self.root))

    def remove(self, name: str) -> None:
        """Remove a folder; as it goes it is one that was never committed."""
        path = self._path(name)
        (path / MANIFEST_FILE).unlink()
        sync(path)
        shutil.rmtree(path)
        sync(self.root)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the lock of this folder, and remove what was begun here.

        The folder is removed again if it was made for this, and nothing was saved.
        """
        is_new = not self.root.exists()
        try:
            self.make()
            lock = self._hold()
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {self.root}: {error.strerror or error}",
                accepted="a folder that is there or can be made, with room in it",
                todo="name another folder",
            ) from error
        try:
            for path in self.root.iterdir():
                if _BEGUN.fullmatch(path.name):
                    self._clear(path)
            yield
        finally:
            if is_new:
                self._unmake()
            os.close(lock)

    def _hold(self) -> int:
        """Return the descriptor of the lock of this folder, which is held.

        Raises:
            OSError: it cannot be made.
            ConfigError: somebody else holds it.
        """
        path = self.root / _LOCK
        while True:
            # No link is followed: whoever holds the lock writes into it.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(path, flags, 0o644)
            try:
                _lock(lock, self.root)
                # Whoever held it before may have removed it since it was opened.
                if path.exists() and os.path.samestat(path.stat(), os.fstat(lock)):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            self.root.mkdir(parents=True, exist_ok=True)

    def _unmake(self) -> None:
        """Remove the folder, if there is nothing in it but the lock."""
        with suppress(OSError):
            if [path.name for path in self.root.iterdir()] == [_LOCK]:
                (self.root / _LOCK).unlink()
                self.root.rmdir()
                self._was_made = False

    def place(self, name: str = "", file: str = "") -> str:
        """Return the path."""
        return str((self._path(name) if name else self.root) / file)

    def _path(self, name: str) -> Path:
        """Return where a committed folder is: one that was to be replaced may still be aside."""
        path, aside = self.root / name, _aside(self.root, name)
        return aside if _is_folder(aside) and not os.path.lexists(path) else path

    def _clear(self, path: Path) -> None:
        name = path.name[1:].removesuffix(".old")
        if path.is_symlink():
            path.unlink()
        elif path.name.endswith(".old") and not os.path.lexists(self.root / name):
            path.rename(self.root / name)  # a kill between two renames
        else:
            shutil.rmtree(path, ignore_errors=True)


class _StagedLocal:
    """A folder that is renamed when all of it is on the disk."""

    def __init__(self, storage: LocalStorage, name: str) -> None:
        self.storage, self.root, self.name = storage, storage.root, name
        self.path = self.root / f".{name}.part"

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """Write a file, and sync it."""
        self.storage.make()
        self._check_replaceable()
        if self.path.is_symlink():
            self.path.unlink(missing_ok=True)
        self.path.mkdir(exist_ok=True)
        path = self._whole(file)
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
        return _open(self._whole(file))

    def _whole(self, file: str) -> Path:
        """Return the path of a file.

        Raises:
            OSError: the folder is a link, which leads elsewhere.
        """
        if self.path.is_symlink():
            raise OSError(errno.ELOOP, "this is a link", str(self.path))
        return self.path / file

    def _check_replaceable(self) -> None:
        """Check that what this folder is to replace is a checkpoint, or one that was removed half.

        Raises:
            FileExistsError: it is something else.
        """
        target = self.root / self.name
        if not os.path.lexists(target):
            return
        entries = list(target.iterdir()) if _is_folder(target) else [target]
        is_whole = any(entry.name == MANIFEST_FILE for entry in entries)
        are_files = all(entry.is_file() and not entry.is_symlink() for entry in entries)
        if not _is_folder(target) or not are_files or not (is_whole or _are_left(entries)):
            raise FileExistsError(
                errno.EEXIST,
                f"something that is no checkpoint has the name {self.name}; move it away",
                str(target),
            )

    def commit(self, last_file: str, data: bytes, files: Collection[str]) -> None:
        """Sync everything, and rename the folder."""
        with self.create(last_file) as file:
            file.write(data)
        for path in self.path.iterdir():
            if path.name != last_file and path.name not in files:
                path.unlink()
        sync(self.path)
        target, aside = self.root / self.name, _aside(self.root, self.name)
        self._check_replaceable()
        if target.exists():
            if aside.is_symlink():
                aside.unlink()
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        self.path.rename(target)
        sync(self.root)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self) -> None:
        """Remove the folder; nothing of what a link leads to."""
        shutil.rmtree(self.path, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the names in a folder would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if _is_folder(path)]


def _is_folder(path: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _are_left(files: Sequence[Path]) -> bool:
    """Whether files are those that a kill leaves of a checkpoint which was being removed."""
    return all(file.suffix == ".safetensors" for file in files)


def _aside(root: Path, name: str) -> Path:
    return root / f".{name}.old"


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, open_file(path, follow=False))


def _lock(descriptor: int, root: Path) -> None:
    """Take the lock, and write into it who holds it.

    Raises:
        ConfigError: somebody else does.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
        raise ConfigError(
            f"another run writes its checkpoints to {root}: {holder or 'it does not say which'}",
            accepted="a folder that no running run writes to",
            todo="wait for it, stop it, or name another folder: hydra.run.dir=FOLDER",
        ) from error
    except OSError:
        return  # a file system without locks: as good as it can
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on host {os.uname().nodename}\n".encode(), 0)
