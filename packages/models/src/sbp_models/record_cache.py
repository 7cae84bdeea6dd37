"""A cache for records that a data set makes once from its files, then reads in any order.

For tokens and click logs. Records of small files are kept in memory. Other records are written
chunk by chunk while they are made, and mapped into memory afterwards. An entry of the cache is a
folder:

    KIND-HASH/records.bin     the records one after the other, and nothing else
    KIND-HASH/about.json      metadata: settings and files, and the number of records
    KIND-HASH.lock            held by the process that makes them; others of its host wait

The hash covers everything that the records depend on: the format, the settings, and path, size and
modification time of each file. The content of the files is not hashed, because that would mean to
read them. An entry is written to a temporary folder and renamed when it is durable. A damaged entry
is made again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sbp_core.errors import ConfigError, RunError, SbpError, SbpValueError
from sbp_core.serialize import dump, load, open_file, parse, read_text
from sbp_core.units import format_bytes, format_seconds
from sbp_core.user_paths import cache_folder, user_path

logger = logging.getLogger(__name__)

#: Size of the files, in bytes, from which on records are not kept in memory.
IN_MEMORY_BYTES = 16 * 2**20

#: Version: increased whenever the same files and settings give different records.
FORMAT = 2

#: Seconds between two log lines about the progress.
_TOLD_EVERY_S = 10.0

_RECORDS, _ABOUT = "records.bin", "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive records.

    Args:
        records: One-dimensional array.
        counts: Counters that are summed over all chunks, such as documents.
        read_bytes: Bytes of the files that have been read so far.
    """

    records: npt.NDArray[Any]
    counts: Mapping[str, int]
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """All records, as a one-dimensional array in memory or mapped; and the summed counters."""

    values: npt.NDArray[Any]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMetadata:
    """Metadata of stored records (`about.json`).

    Args:
        key: Hash of everything that they depend on.
        num_records: Number of records.
        record_bytes: Size of a record.
        counts: The summed counters.
        made_of: The settings and files, for human readers.
    """

    key: str
    num_records: int
    record_bytes: int
    counts: Mapping[str, int]
    made_of: Mapping[str, Any]

    def __post_init__(self) -> None:
        if min(self.num_records, *self.counts.values(), 0) < 0:
            raise SbpValueError(f"{self.num_records} records, counts {dict(self.counts)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Description of records: the files and settings that they depend on, and their maker.

    Args:
        kind: Kind of the records, for names of entries, such as `tokens`.
        files: The files, in order.
        settings: The other settings that they depend on, as JSON.
        dtype: Dtype of a record.
        chunks: Makes the records; called if they are not stored.
    """

    kind: str
    files: Sequence[Path]
    settings: Mapping[str, Any]
    dtype: np.dtype[Any]
    chunks: Callable[[], Iterable[Chunk]]


def load_records(recipe: Recipe, cache: str | None) -> Records:
    """Return records: from the cache, or made now.

    Args:
        recipe: Description of the records.
        cache: The folder of the cache. If None, records of small files are kept in memory, other
            records in the user's cache folder.

    Raises:
        ConfigError: raised by `recipe.chunks`; or a file was changed meanwhile.
        RunError: the cache cannot be written, such as on a full disk.
    """
    sources = _sources(recipe.files)
    total_bytes = sum(size for _, size, _ in sources)
    if cache is None and total_bytes < IN_MEMORY_BYTES:
        chunks = list(recipe.chunks())
        empty = np.empty(0, recipe.dtype)
        return Records(
            values=np.concatenate([empty, *(chunk.records for chunk in chunks)]),
            counts=_total(chunk.counts for chunk in chunks),
        )
    folder = cache_folder("data") if cache is None else user_path(cache, key="data.cache")
    entry = _Entry(recipe, folder, sources)
    found = entry.load()
    if found is not None:
        logger.info("%s are read from %s", recipe.kind, entry.path)
    else:
        with _alone(entry) as is_locked:
            # Another process may have made it while this process waited.
            found = entry.load() or entry.make(total_bytes, is_locked)
    return found


class _Entry:
    """The place of records in a cache folder."""

    def __init__(self, recipe: Recipe, folder: Path, sources: list[tuple[str, int, int]]) -> None:
        self.recipe, self.folder, self.sources = recipe, folder, sources
        made_of = [FORMAT, recipe.kind, str(recipe.dtype), recipe.settings, sources]
        self.key = blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=32).hexdigest()
        self.path = folder / f"{recipe.kind}-{self.key[:32]}"

    def load(self) -> Records | None:
        """Return the stored records; None, with a log line, if they are missing or damaged."""
        if not self.path.exists():
            return None
        try:
            text = read_text(self.path / _ABOUT)
            about = load(parse(text), RecordMetadata)
            if about.key != self.key or about.record_bytes != self.recipe.dtype.itemsize:
                raise SbpValueError("it was made from other files or settings")
            values = _mapped(self.path / _RECORDS, self.recipe.dtype, about.num_records)
        except (OSError, SbpError) as error:
            logger.warning("%s is damaged, and is created again: %s", self.path, error)
            return None
        return Records(values=values, counts=about.counts)

    def make(self, total_bytes: int, is_locked: bool) -> Records:
        """Make the records, and put them in place atomically."""
        mine = f".{self.path.name}.{platform.node()}-"
        aside = self.folder / f"{mine}{os.getpid()}-{secrets.token_hex(4)}.part"
        try:
            with self.writing():
                if is_locked:  # left by a killed process of this host
                    for left in self.folder.glob(f"{escape(mine)}*.part"):
                        shutil.rmtree(left, ignore_errors=True)
                aside.mkdir()
            about = self._fill(aside, total_bytes)
            with self.writing():
                self._commit(aside, about)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        found = self.load()
        if found is None:
            raise RunError(
                f"{self.path} has been damaged since it was written", todo="check the disk"
            )
        return found

    def _fill(self, aside: Path, total_bytes: int) -> RecordMetadata:
        """Write the records; return their metadata."""
        progress = _Progress(self.recipe.kind, total_bytes)
        counts: Counter[str] = Counter()
        num_records = 0
        with self.writing():
            file = (aside / _RECORDS).open("xb", buffering=0)
        with file:
            for chunk in self.recipe.chunks():
                with self.writing():
                    _write(file, chunk.records)
                num_records += len(chunk.records)
                counts.update(chunk.counts)
                progress.tell(chunk.read_bytes)
            with self.writing():
                os.fsync(file.fileno())
        if _sources(self.recipe.files) != self.sources:
            raise ConfigError(
                "a file of the data was changed while it was read",
                where=str(self.recipe.files[0]),
                accepted="files that do not change meanwhile",
                todo="try again when they are complete",
            )
        logger.info(
            "made %s in %s: %s in %s",
            self.recipe.kind,
            format_seconds(progress.seconds()),
            format_bytes(num_records * self.recipe.dtype.itemsize),
            self.path,
        )
        return RecordMetadata(
            key=self.key,
            num_records=num_records,
            record_bytes=self.recipe.dtype.itemsize,
            counts=dict(counts),
            made_of={
                **self.recipe.settings,
                "first_file": self.sources[0][0],
                "num_files": len(self.sources),
            },
        )

    def _commit(self, aside: Path, about: RecordMetadata) -> None:
        text = json.dumps(dump(about, RecordMetadata), indent=1)
        with (aside / _ABOUT).open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync(aside)
        try:
            aside.rename(self.path)
        except OSError:
            if not self.path.exists():
                raise
            # The old entry is damaged; or, without file locks, another process has made it.
            if self.load() is None:
                shutil.rmtree(self.path)
                aside.rename(self.path)
        _sync(self.folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Convert errors of writing into an error that names the cache."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"the {self.recipe.kind} of the data cannot be kept in {self.folder}: "
                f"{error.strerror or error}",
                accepted="a folder that this user may write to, with room for all of them",
                todo="make room, or name another folder: data.cache=FOLDER",
            ) from error


class _Progress:
    """Logs the progress of making records now and then."""

    def __init__(self, kind: str, total_bytes: int) -> None:
        self._kind, self._total_bytes = kind, total_bytes
        self._begun = self._told = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._begun

    def tell(self, read_bytes: int) -> None:
        """Log the bytes read so far, unless the last log line is recent."""
        now = time.monotonic()
        if now - self._told < _TOLD_EVERY_S:
            return
        self._told = now
        logger.info(
            "making %s: %.0f%%, %s of %s",
            self._kind,
            100 * read_bytes / max(self._total_bytes, 1),
            format_bytes(read_bytes),
            format_bytes(self._total_bytes),
        )


@contextmanager
def _alone(entry: _Entry) -> Iterator[bool]:
    """Wait until no other process of this host makes an entry; yield whether it is locked."""
    with entry.writing():
        entry.folder.mkdir(parents=True, exist_ok=True)
        file = entry.path.with_name(f"{entry.path.name}.lock").open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is making %s; this process waits for it", entry.path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: all processes make it, one result is kept
            yield False
            return
        yield True


def _sources(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and modification time of each file."""
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read: {error.strerror}",
                accepted="a file that this user may read",
            ) from error
        # Not resolved, because that queries each folder of the path: slow for many files.
        found.append((str(file.absolute()), status.st_size, status.st_mtime_ns))
    return found


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Return the records of a file, mapped.

    Raises:
        OSError: the file cannot be opened.
        SbpValueError: it is no plain file of that size.
    """
    with open_file(path, follow=False) as file:
        status = os.fstat(file.fileno())
        if status.st_size != count * dtype.itemsize:
            raise SbpValueError(
                f"it has {status.st_size} bytes",
                where=str(path),
                accepted=f"{count * dtype.itemsize} bytes: {count} records of {dtype.itemsize}",
            )
        if not count:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(count,)))


def _write(file: FileIO, records: npt.NDArray[Any]) -> None:
    rest = np.ascontiguousarray(records).view(np.uint8).data
    while rest:
        rest = rest[file.write(rest) :]


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for some in counts:
        found.update(some)
    return dict(found)


def _sync(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    with suppress(OSError):  # some network file systems cannot
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
