"""One name, one meaning: files of a package, and public classes of all packages."""

from __future__ import annotations

import ast
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


#: The zoo, and the models of test kits: each has an `Attention`, an `Mlp` and the like of its own.
MODELS = ("sbp_models", "sbp_torch/testing/models.py")


def test_no_two_public_classes_have_one_name() -> None:
    files = [
        path
        for path in ROOT.glob("packages/*/src/**/*.py")
        if not path.as_posix().partition("/src/")[2].startswith(MODELS)
    ]

    found = shared(
        (node.name, path)
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )

    assert not found
