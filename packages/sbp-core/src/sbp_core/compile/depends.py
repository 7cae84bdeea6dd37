"""The source files that a result depends on: which they are, and what has changed. No torch.

A result of running other people's Python may depend on all of it. So it is kept with every source
file that was loaded when it was made, as compilers' caches do that follow include files: whatever
code ran, and every constant that it read, came from one of them. That is more than needed: an edit
of a file that had no influence costs one compilation. Left out are the standard library and the
packages that the caller names, whose versions belong into the key instead.

Not seen: files that are read as data, and what a program changes in loaded modules while it runs
(`capture.fingerprint` looks at the functions that the program holds).
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Folders of installed packages, which lie inside that of the standard library.
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file as it was.

    Args:
        path: Absolute.
        digest: Of its content; of a compiled module its size and time of change; empty if it could
            not be read.
    """

    path: str
    digest: str

    @classmethod
    def read(cls, path: str) -> SourceFile:
        """Return a file as it is now."""
        try:
            if path.endswith(".py"):
                content = Path(path).read_bytes()
                return cls(path=path, digest=hashlib.blake2b(content, digest_size=16).hexdigest())
            stat = Path(path).stat()
            return cls(path=path, digest=f"{stat.st_size} bytes of {stat.st_mtime_ns} ns")
        except OSError:
            return cls(path=path, digest="")


def loaded_sources(without: Iterable[str] = ()) -> tuple[SourceFile, ...]:
    """Return the files of all modules that are loaded now, sorted by path.

    Args:
        without: Top-level packages to leave out; of the standard library none is in it.
    """
    left_out = set(without)
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    paths = set()
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.split(".")[0] not in left_out and not _is_standard(path, standard):
            paths.add(str(Path(path).absolute()))
    return tuple(map(SourceFile.read, sorted(paths)))


def _is_standard(path: str, folders: Sequence[str]) -> bool:
    parts = Path(path).parts
    return path.startswith(tuple(folders)) and not any(name in parts for name in _INSTALLED)


def changed(files: Iterable[SourceFile]) -> str:
    """Return the path of the first file that is no longer what it was; empty if there is none."""
    return next((file.path for file in files if SourceFile.read(file.path) != file), "")


def package_digest(folder: Path) -> str:
    """Return 32 hex digits of all Python files of a package, loaded or not."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0")
        found.update(hashlib.blake2b(path.read_bytes()).digest())
    return found.hexdigest()
