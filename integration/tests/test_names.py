"""One name, one meaning: files of a package, and public classes of all packages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from repository import ROOT


def shared(named: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Return the names that several files have, each with these files."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, path in named:
        found[name].append(path.relative_to(ROOT).as_posix())
    return {name: sorted(paths) for name, paths in found.items() if len(paths) > 1}


def test_no_two_files_of_a_package_have_one_name() -> None:
    files = [path for path in ROOT.glob("packages/*/src/**/*.py") if path.name != "__init__.py"]
    packages = len(ROOT.parts) + 1

    found = shared((f"{path.parts[packages]}: {path.name}", path) for path in files)

    assert not found
