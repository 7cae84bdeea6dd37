"""The packages of this repository, and their requirements: our own and third-party packages.

Packages are found in `packages/*/pyproject.toml`; a new one needs no edit here.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

#: One exact version: pip then takes a CPU build if it is configured for one.
TORCH = os.environ.get("SBP_TORCH", "torch==2.13.0")

#: Packages that depend on the build of PyTorch, and so are not in constraints.txt.
OF_TORCH = re.compile(r"(torch|triton|cupy.*|cuda-.*|nvidia-.*)$")


def name_of(requirement: str) -> str:
    """Return the name of the distribution in a requirement."""
    return re.split(r"[^\w-]", requirement)[0]


@dataclass(frozen=True)
class Package:
    """A package of this repository."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of its folder, which sessions use."""
        return self.folder.name

    @property
    def project(self) -> dict[str, Any]:
        """The table `project` of its pyproject.toml."""
        text = (self.folder / "pyproject.toml").read_text("utf-8")
        project: dict[str, Any] = tomllib.loads(text)["project"]
        return project

    @property
    def module(self) -> str:
        """The name under which it is imported."""
        return str(self.project["name"]).replace("-", "_")

    @property
    def dependencies(self) -> list[str]:
        """The requirements that it declares, without extras."""
        return list(self.project.get("dependencies", []))

    @property
    def extras(self) -> dict[str, list[str]]:
        """The extras that it offers to users, with their requirements.

        Without `all`, which installs our other packages: a package is tested alone.
        """
        found = self.project.get("optional-dependencies", {})
        return {name: entries for name, entries in found.items() if name not in ("all", "test")}

    @property
    def extra_modules(self) -> list[str]:
        """The import names of the packages that the extras install."""
        entries = [entry for extra in self.extras.values() for entry in extra]
        return sorted({name_of(entry).replace("-", "_") for entry in entries})

    @property
    def test_dependencies(self) -> list[str]:
        """The requirements that it declares for its tests."""
        return list(self.project.get("optional-dependencies", {}).get("test", []))

    @property
    def tests_at_once(self) -> bool:
        """Whether its tests may run in several processes: it declares pytest-xdist."""
        return any(entry.startswith("pytest-xdist") for entry in self.test_dependencies)


#: The requirements of the tests of all packages.
_SHARED = ("constraints.txt", "integration/repository.py", "noxfile.py", "pyproject.toml")


def packages_below(root: Path) -> list[Package]:
    """Return the packages below the root of a copy of this repository."""
    return [Package(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]


PACKAGES = packages_below(ROOT)


def needed_of(package: Package, more: Sequence[str] = ()) -> list[Package]:
    """Return our packages that a package requires, directly or indirectly."""
    found: list[Package] = []
    todo = [*package.dependencies, *more]
    while todo:
        name = name_of(todo.pop())
        for other in PACKAGES:
            if other.project["name"] == name and other not in (*found, package):
                found.append(other)
                todo += other.dependencies
    return found


def touched_packages(paths: Iterable[str]) -> list[Package]:
    """Return the packages whose tests a change may break: changed packages and their dependents.

    Args:
        paths: Paths of the changed files, from the root of the repository. Shared files, such as
            the noxfile, affect all packages; tests of integration and documents affect none.
    """
    touched: set[Package] = set()
    for path in paths:
        top, _, rest = path.partition("/")
        if top == "packages":
            touched |= {one for one in PACKAGES if one.name == rest.partition("/")[0]}
        elif path in _SHARED:
            return PACKAGES
    return [
        package
        for package in PACKAGES
        if package in touched or touched & {*needed_of(package, package.test_dependencies)}
    ]


def lowest_of(requirements: Iterable[str]) -> list[str]:
    """Return requirements that pin third-party packages to the lowest declared versions."""
    found = {}
    for entry in requirements:
        match = re.match(r"([\w-]+)(?:>=([\d.]+))?", entry)
        if match and match[2] and not match[1].startswith("sbp-"):
            found[match[1]] = f"{match[1]}=={match[2]}"
    return sorted(found.values())


def needed_of_others(with_tests: bool = False, with_extras: bool = False) -> set[str]:
    """Return the third-party requirements of all packages."""
    found = {entry for package in PACKAGES for entry in package.dependencies}
    if with_tests:
        found |= {entry for package in PACKAGES for entry in package.test_dependencies}
    if with_extras:
        extras = [extra for package in PACKAGES for extra in package.extras.values()]
        found |= {entry for extra in extras for entry in extra}
    ours = {package.project["name"] for package in PACKAGES} | (set() if TORCH else {"torch"})
    return {entry for entry in found if name_of(entry) not in ours}


#: Links of a document; and code, in which brackets are no links.
LINK_OR_CODE = re.compile(
    r"^```.*?^```|`[^`\n]*`|\]\((?P<target>[^)#\s]+)[^)]*\)", re.MULTILINE | re.DOTALL
)


def documents(root: Path = ROOT) -> list[str]:
    """Return the paths of all documents, from the root of the repository."""
    return [
        path.relative_to(root).as_posix()
        for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "integration/[!.]*/*.md")
        for path in sorted(root.glob(pattern))
    ]


def dead_links(root: Path = ROOT) -> list[str]:
    """Return dead links between the documents, each after the document's path."""
    return [
        f"{path}: {link}"
        for path in documents(root)
        for link in LINK_OR_CODE.findall((root / path).read_text("utf-8"))
        if link and "://" not in link and not (root / path).parent.joinpath(link).exists()
    ]
