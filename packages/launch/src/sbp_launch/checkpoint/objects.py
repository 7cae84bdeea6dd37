"""Storage of checkpoints at an address that `fsspec` can access, such as an object store.

    s3://bucket/run/
      step-00000100/
        rank-00000.safetensors
        manifest.json            written last: with it the folder is a checkpoint
      step-00000100@2/           replaces step-00000100 when it has a manifest

An object store has no rename, and an object appears atomically. So files are written to their final
place, and the manifest is the commit. There is no lock: two runs must not use one address.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from sbp_core.errors import ConfigError
from sbp_core.plugins import StagedFolder, StorageFactory
from sbp_launch.checkpoint.folder_storage import MANIFEST_FILE
from sbp_launch.secret_settings import refuse_secret_address


@dataclass(frozen=True, slots=True, kw_only=True)
class FsspecConfig:
    """Settings of the storage `fsspec`.

    Args:
        url: Address of the folder for the checkpoints of the run, such as `s3://bucket/run`;
            `{run}` in it stands for the name of the run folder.
        options: Further options of the file system, such as `anon` of `s3`.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "://" not in self.url:
            raise ConfigError(
                f"url={self.url!r} is no address",
                accepted="s3://bucket/run, gs://bucket/{run}, memory://run and so on",
                todo="for a folder of this machine: storage=local",
            )


def build_fsspec(config: FsspecConfig) -> StorageFactory:
    """Return a function from a run folder to its `FsspecStorage`."""
    return lambda run_folder: FsspecStorage(
        config.url.replace("{run}", run_folder.absolute().name), config.options
    )


class FsspecStorage:
    """Checkpoints as folders at an address.

    Args:
        url: Address of the parent folder.
        options: Options of the file system.

    Raises:
        ConfigError: fsspec is not installed or cannot handle the address, or it has a password.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        try:
            import fsspec  # type: ignore[import-untyped] # it has no types
        except ImportError as error:
            raise ConfigError(
                "storage=fsspec needs fsspec, which is not installed",
                todo="pip install 'sbp-launch[fsspec]' and what the address needs, such as s3fs",
            ) from error
        # The address is printed and recorded.
        refuse_secret_address(url, "the address of checkpoints")
        self.url = url.rstrip("/")
        try:
            found = fsspec.core.url_to_fs(self.url, **(options or {}))
        except (ValueError, ImportError, TypeError) as error:
            raise ConfigError(
                f"no installed package reaches {url!r}: {error}",
                accepted="an address of s3://, gs://, az://, memory:// and so on, as fsspec has it",
            ) from error
        self.files: Any = found[0]
        self._root = str(found[1]).rstrip("/")

    def names(self) -> Sequence[str]:
        """Return the names of folders with a manifest."""
        return sorted(self.committed_folders())

    def sizes(self, name: str) -> Mapping[str, int]:
        """Return the bytes of each file."""
        return {
            str(entry["name"]).rpartition("/")[2]: int(entry["size"])
            for entry in self.files.ls(self._committed_folder(name), detail=True)
            if entry["type"] == "file"
        }

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file."""
        return cast(BinaryIO, self.files.open(f"{self._committed_folder(name)}/{file}", "rb"))

    def stage(self, name: str) -> StagedFolder:
        """Return a folder to write to."""
        return _StagedObjects(self, name)

    def remove(self, name: str) -> None:
        """Remove a folder, its manifest first."""
        path = self._committed_folder(name)
        self.files.rm_file(f"{path}/{MANIFEST_FILE}")
        self.files.rm(path, recursive=True)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Remove unfinished and replaced folders; an object store has no locks."""
        try:
            kept = set(self.committed_folders().values())
            for folder in self._folders():
                if self.path(folder) not in kept:
                    self.files.rm(self.path(folder), recursive=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {self.url}: {error.strerror or error}",
                accepted="an address that can be read and written",
            ) from error
        yield

    def place(self, name: str = "", file: str = "") -> str:
        """Return the address."""
        return "/".join(filter(None, (self.url, name, file)))

    def committed_folders(self) -> dict[str, str]:
        """Return the path of each committed folder by name; the last one if it was replaced."""
        found: dict[str, tuple[int, str]] = {}
        for folder in self._folders():
            name, _, attempt = folder.partition("@")
            path, number = self.path(folder), int(attempt) if attempt.isdecimal() else 1
            if found.get(name, (0, ""))[0] < number and self.files.isfile(
                f"{path}/{MANIFEST_FILE}"
            ):
                found[name] = (number, path)
        return {name: path for name, (_, path) in found.items()}

    def path(self, folder: str) -> str:
        """Return the path of a folder in the file system."""
        return f"{self._root}/{folder}"

    def _committed_folder(self, name: str) -> str:
        path = self.committed_folders().get(name)
        if path is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.place(name))
        return path

    def _folders(self) -> list[str]:
        self.files.invalidate_cache()  # other processes write here, too
        try:
            entries = self.files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [
            str(entry["name"]).rstrip("/").rpartition("/")[2]
            for entry in entries
            if entry["type"] == "directory"
        ]


class _StagedObjects:
    """A new folder, committed by its manifest.

    It differs from the folder that it replaces. All processes that write choose the same folder,
    because nothing is committed before all have written.
    """

    def __init__(self, storage: FsspecStorage, name: str) -> None:
        self._storage = storage
        self._former = storage.committed_folders().get(name)
        folder = name
        if self._former is not None:
            attempt = self._former.rpartition("/")[2].partition("@")[2]
            folder = f"{name}@{int(attempt or 1) + 1}"
        self._path = storage.path(folder)
        self._is_committed = False

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """Write a file."""
        files, path = self._storage.files, f"{self._path}/{file}"
        files.makedirs(self._path, exist_ok=True)
        opened = files.open(path, "wb")
        try:
            yield opened
            opened.close()
        except BaseException:
            with suppress(OSError, ValueError):
                opened.close()
            with suppress(OSError):
                files.rm_file(path)
            raise

    def open(self, file: str) -> BinaryIO:
        """Open a file."""
        return cast(BinaryIO, self._storage.files.open(f"{self._path}/{file}", "rb"))

    def commit(self, last_file: str, data: bytes, files: Collection[str]) -> None:
        """Write the manifest, which makes the folder visible, and remove the former one."""
        store = self._storage.files
        store.invalidate_cache()
        with suppress(FileNotFoundError):
            for entry in store.ls(self._path, detail=True):
                if str(entry["name"]).rpartition("/")[2] not in files:
                    store.rm_file(entry["name"])
        with self.create(last_file) as file:
            file.write(data)
        self._is_committed = True
        if self._former is not None:
            store.rm(self._former, recursive=True)

    def discard(self) -> None:
        """Remove the folder, unless it is committed."""
        if self._is_committed:
            return
        with suppress(OSError):
            self._storage.files.rm(self._path, recursive=True)
