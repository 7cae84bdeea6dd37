"""Compiled plans on disk, found by hash. No torch.

    folder/<key>.plan      magic, checksum, compressed `codec.encode` of the value and of the files
                           that it depends on

Two kinds of keys are in use:

* `plan_key`: graph, strategy and options, all at hand -> the plan that `compile_plan` would make;
* a fingerprint of the program itself (`capture.fingerprint`), which spares capturing and planning,
  too. Such an entry names the source files that were loaded when it was made, and holds as long as
  none of them has changed (`compile.depends`).

Entries are written aside and renamed, so readers see whole ones only and several processes may
write at once; the last one stays. An entry that is damaged is reported and made again. When the
folder outgrows its limit, the entries that were not used for longest go.

>>> import tempfile
>>> cache = PlanCache(Path(tempfile.mkdtemp()))
>>> cache.value("1234", make=lambda: ("made", 1))
('made', 1)
>>> cache.value("1234", make=lambda: ("made", 2))
('made', 1)
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sbp_core.compile import codec
from sbp_core.compile.depends import SourceFile, changed, package_digest
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.segments import CompileOptions
from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.graph.ir import LogicalGraph
from sbp_core.graph.serialize import graph_hash
from sbp_core.strategy import Strategy

logger = logging.getLogger(__name__)

#: What an entry begins with; the last byte before the line feed is its format.
MAGIC = b"sbp plan 1\n"

#: Bytes that a folder may hold unless the caller says otherwise.
LIMIT_BYTES = 1 << 30

_CHECKSUM_BYTES = 16

#: What a writer left behind that ended before it renamed is removed after this many seconds.
_ABANDONED_S = 3600.0


class PlanCache:
    """A folder of entries.

    Args:
        folder: Made when the first entry is stored.
        limit_bytes: Most bytes of all entries, > 0; the one stored last stays in any case.
    """

    def __init__(self, folder: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes={limit_bytes}", accepted="an integer > 0")
        self.folder, self.limit_bytes = folder, limit_bytes

    def path(self, key: str) -> Path:
        """Return where an entry is, or would be."""
        return self.folder / f"{key}.plan"

    def value(
        self,
        key: str,
        make: Callable[[], Any],
        files: Callable[[], Sequence[SourceFile]] = tuple,
    ) -> Any:
        """Return the value of a key; made and stored if there is none.

        Args:
            key: Hex digits that cover all that the value depends on, but for `files`.
            make: Makes the value; see `codec.encode` for what it may be.
            files: Called after `make`; returns the files that the value depends on.
        """
        found = self.load(key)
        if found is None:
            found = make()
            self.store(key, found, files())
        return found

    def load(self, key: str) -> Any | None:
        """Return the value of a key, or None: not stored or not readable, of older files, damaged.

        Warns:
            UserWarning: the entry is damaged; it is removed.
        """
        path = self.path(key)
        try:
            value, files = _unpack(path.read_bytes())
        except OSError:
            return None
        except SbpValueError as error:
            self._remove(path)
            warnings.warn(
                f"the cached plan {path} is damaged and is made again: {error}", stacklevel=2
            )
            return None
        if other := changed(files):
            logger.info("%s has changed: the cached plan %s is made again", other, path.name)
            return None
        with suppress(OSError):
            os.utime(path)  # used now
        return value

    def store(self, key: str, value: Any, files: Sequence[SourceFile] = ()) -> None:
        """Store a value.

        Args:
            key: Names the entry.
            value: See `codec.encode` for what it may be.
            files: Files that it depends on beside its key.

        Raises:
            SbpTypeError: the value holds something that cannot be written.

        Warns:
            UserWarning: the folder cannot be written; the run goes on without.
        """
        data = _pack(value, files)
        path = self.path(key)
        aside = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(data)
            aside.replace(path)
        except OSError as error:
            self._remove(aside)
            warnings.warn(f"a compiled plan cannot be cached: {error}", stacklevel=2)
            return
        self._shrink(path)

    def _shrink(self, newest: Path) -> None:
        """Remove what was not used for longest until the limit holds, and abandoned files."""
        found = []
        for path in self.folder.iterdir():
            # Another process may have removed it in the meantime.
            with suppress(OSError):
                stat = path.stat()
                if path.suffix == ".part" and stat.st_mtime < time.time() - _ABANDONED_S:
                    self._remove(path)
                elif path.suffix == ".plan":
                    found.append((stat.st_mtime_ns, path.name, stat.st_size, path))
        total = sum(size for *_, size, _ in found)
        for _, _, size, path in sorted(found):
            if total <= self.limit_bytes:
                break
            if path != newest:
                self._remove(path)
                total -= size

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()


def plan_key(graph: LogicalGraph, strategy: Strategy, options: CompileOptions, **also: Any) -> str:
    """Return the key of what `compile_plan(graph, strategy, options)` makes.

    Args:
        graph: Source lines do not count.
        strategy: Its report does not count.
        options: All of them.
        also: What else the plan depends on, such as the versions of plugins that bring rules.
    """
    parts = (graph_hash(graph), replace(strategy, report={}), options, also)
    return key_of("plan", compiler_digest(), *parts)


def key_of(*parts: Any) -> str:
    """Return 32 hex digits of some values; see `codec.encode` for what they may be."""
    return hashlib.blake2b(codec.encode(parts), digest_size=16).hexdigest()


def compiler_digest() -> str:
    """Return 32 hex digits of this package's own code: another compiler makes other plans."""
    return package_digest(Path(__file__).parent.parent)


def compile_cached(
    cache: PlanCache,
    graph: LogicalGraph,
    strategy: Strategy,
    options: CompileOptions | None = None,
    **also: Any,
) -> PhysicalPlan:
    """Return the plan that `compile_plan` makes, from the cache if it is there.

    Raises:
        PlanError, SignatureError, SbpValueError: see `compile_plan`.
    """
    from sbp_core.compile import compile_plan  # the package imports its modules

    chosen = options or CompileOptions()
    key = plan_key(graph, strategy, chosen, **also)
    plan = cache.value(key, lambda: compile_plan(graph, strategy, chosen))
    assert isinstance(plan, PhysicalPlan), f"the cache holds a {type(plan).__name__}"
    return plan


def default_folder(environment: Mapping[str, str], home: Path) -> Path:
    """Return where plans are cached if nobody says: `$XDG_CACHE_HOME/sbp/plans`.

    Args:
        environment: Such as `os.environ`; the caller reads it.
        home: The user's folder, whose `.cache` is taken if the variable is not set.
    """
    base = environment.get("XDG_CACHE_HOME", "")
    # The specification of that variable says that relative paths are to be ignored.
    return (Path(base) if Path(base).is_absolute() else home / ".cache") / "sbp" / "plans"


def _pack(value: Any, files: Sequence[SourceFile]) -> bytes:
    packed = zlib.compress(codec.encode((value, tuple(files))), 3)
    return MAGIC + _checksum(packed) + packed


def _unpack(data: bytes) -> tuple[Any, tuple[SourceFile, ...]]:
    """Read what `_pack` made.

    Raises:
        SbpValueError: the bytes are damaged, or of another version.
    """
    start = len(MAGIC) + _CHECKSUM_BYTES
    if not data.startswith(MAGIC):
        raise SbpValueError("it does not begin as an entry does", accepted=repr(MAGIC))
    packed = data[start:]
    if _checksum(packed) != data[len(MAGIC) : start]:
        raise SbpValueError(f"its {len(data)} bytes do not give its checksum")
    try:
        found = codec.decode(zlib.decompress(packed))
    except zlib.error as error:
        raise SbpValueError(f"it cannot be decompressed: {error}") from error
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], tuple)):
        raise SbpValueError("it holds no pair of a value and files")
    value, files = found
    if not all(isinstance(file, SourceFile) for file in files):
        raise SbpValueError("it depends on what are no files")
    return value, files


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
