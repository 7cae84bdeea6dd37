"""The check that code of one package imports another package through its rooms only.

It applies to the sources of all packages, `integration/` and the example plugin, but not to tests
of a package: tests of sbp-torch check the core on real tensors and use its private modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from api.rooms import Packages, python_files


@dataclass(frozen=True, slots=True)
class Fault:
    """An import of a private module, or an error in a room."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def faults(packages: Packages) -> Iterator[Fault]:
    """Yield all faults: first those of rooms, then those of imports, file by file."""
    for name, room in packages.rooms.items():
        path = room.path.relative_to(packages.root)
        for offered in room.offers or ():
            if not _is_there(packages, name, offered):
                yield Fault(path, 1, f"{name} offers {offered!r}, and has no such name")
    for path, package in _users(packages):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for what in _wrong(packages, package, node):
                yield Fault(path.relative_to(packages.root), node.lineno, what)


def _users(packages: Packages) -> Iterator[tuple[Path, str]]:
    """Yield the files to check, each with its package, or an empty name."""
    for name, module in packages.modules.items():
        yield module.path, name.partition(".")[0]
    folder = packages.root / "integration"
    if folder.is_dir():
        for path in python_files(folder):
            yield path, ""


def _wrong(packages: Packages, package: str, node: ast.AST) -> Iterator[str]:
    """Yield the faults of a statement in a file of a package."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if _is_foreign(packages, package, alias.name) and alias.name not in packages.rooms:
                yield _behind(packages, alias.name)
    elif isinstance(node, ast.ImportFrom) and node.module:
        if not _is_foreign(packages, package, node.module):
            return
        room = packages.rooms.get(node.module)
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            if whole in packages.rooms or (room and alias.name in (room.offers or ())):
                continue
            if room is None or whole in packages.modules:
                yield _behind(packages, node.module if room is None else whole)
                return
            yield (
                f"{node.module} does not offer {alias.name!r}; if others need it, "
                f"add it to its __all__"
            )


def _is_foreign(packages: Packages, package: str, module: str) -> bool:
    """Whether a module belongs to another one of our packages."""
    top = module.partition(".")[0]
    return top in packages.names and top != package


def _behind(packages: Packages, module: str) -> str:
    room = packages.room_of(module)
    mend = f"import from {room}" if room else "its package declares no room"
    return f"{module} is private; {mend}"


def _is_there(packages: Packages, room: str, name: str) -> bool:
    module = packages.modules[room]
    return (
        f"{room}.{name}" in packages.modules or name in module.definitions or name in module.sources
    )
