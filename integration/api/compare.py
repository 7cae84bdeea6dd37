"""What changed in the API of each package since its last release, and which version that asks for.

A release of a package is a tag `NAME-vX.Y.Z`, such as `sbp-core-v0.1.0`. Changes are found by
griffe, in the names that rooms offer; those of rooms that say `Stability: internal.` count for
nothing. Versions are asked for as https://semver.org says:

| change | 0.Y.Z becomes | X.Y.Z becomes |
|---|---|---|
| something that a stable room offered is gone, or is called otherwise | 0.(Y+1).0 | (X+1).0.0 |
| the same of a provisional room | 0.(Y+1).0 | X.(Y+1).0 |
| something new is offered | 0.Y.(Z+1) | X.(Y+1).0 |
| nothing of that | as it was | as it was |
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from api.rooms import Module, Packages

Version = tuple[int, int, int]


class Level(IntEnum):
    """How much a change asks of the version.

    `MINOR` is something new, `BREAKS_PROVISIONAL` also a minor version, which before version 1
    counts as much as `MAJOR`: ranges such as `>=0.1,<0.2` shall keep it out.
    """

    NOTHING = 0
    PATCH = 1
    MINOR = 2
    BREAKS_PROVISIONAL = 3
    MAJOR = 4


#: How the level of a change is printed.
_LABELS = {Level.MINOR: "new", Level.BREAKS_PROVISIONAL: "breaks", Level.MAJOR: "breaks"}


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the API.

    Args:
        level: What it asks for, from version 1 on.
        what: The change, in one line.
    """

    level: Level
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the changes of one package ask for.

    Args:
        name: Of the distribution.
        release: The git revision compared with; empty if nothing was released.
        released, version: The version then, and the one that stands in `pyproject.toml` now.
        wanted: The least version that will do.
        changes: What changed.
        has_history: Whether the changelog has a heading for the version.
    """

    name: str
    release: str
    released: Version
    version: Version
    wanted: Version
    changes: tuple[Change, ...] = ()
    has_history: bool = True

    @property
    def ok(self) -> bool:
        """Whether the version does."""
        return not self.release or (self.version >= self.wanted and self.has_history)

    def __str__(self) -> str:
        if not self.release:
            return f"{self.name} {_text(self.version)}: nothing of it was released"
        head = f"{self.name} {_text(self.version)}, compared with {self.release}: "
        if self.version < self.wanted:
            head += f"the changes ask for version {_text(self.wanted)} or higher"
        elif not self.has_history:
            head += "the changelog has no heading for this version"
        else:
            head += "the version does" if self.changes else "no change of its API"
        lines = [f"  {_LABELS[change.level]:6} {change.what}" for change in self.changes]
        return "\n".join([head, *lines])


def compare(root: Path, against: str = "", folder: str = "*") -> Iterator[Verdict]:
    """Compare every package of a repository with its last release.

    Args:
        root: The repository.
        against: A git revision to compare all packages with, instead of their tags.
        folder: Of the only package to compare; `*` for all.
    """
    for project in sorted(root.glob(f"packages/{folder}/pyproject.toml")):
        name, version = _name_and_version(project.read_text("utf-8"))
        release = against or _last_release(root, name)
        if not release:
            yield Verdict(name=name, release="", released=version, version=version, wanted=version)
            continue
        with TemporaryDirectory() as temporary:
            old_root = Path(temporary)
            _unpack(root, release, old_root)
            old_project = old_root / project.relative_to(root)
            if not old_project.exists():  # a package that is new
                yield Verdict(
                    name=name, release="", released=version, version=version, wanted=version
                )
                continue
            _, released = _name_and_version(old_project.read_text("utf-8"))
            changes = tuple(_changes(old_root, root, name.replace("-", "_")))
            level = max((change.level for change in changes), default=Level.NOTHING)
            yield Verdict(
                name=name,
                release=release,
                released=released,
                version=version,
                wanted=next_version(released, level),
                changes=changes,
                has_history=_has_history(project.parent / "CHANGELOG.md", version),
            )


def next_version(released: Version, level: Level) -> Version:
    """Return the least version after `released` that changes of a level may have."""
    major, minor, patch = released
    if level is Level.NOTHING:
        return released
    if major == 0:
        # Before version 1 everything counts one place further to the right.
        breaks = level >= Level.BREAKS_PROVISIONAL
        return (0, minor + 1, 0) if breaks else (0, minor, patch + 1)
    if level is Level.MAJOR:
        return major + 1, 0, 0
    return (major, minor, patch + 1) if level is Level.PATCH else (major, minor + 1, 0)


def _changes(old_root: Path, new_root: Path, package: str) -> Iterator[Change]:
    """Yield the changes of what the rooms of a package offer."""
    import griffe  # in the session `api` only

    old, new = Packages.below(old_root), Packages.below(new_root)
    old_tree, new_tree = (_griffe(griffe, root, package) for root in (old_root, new_root))
    for name, room in old.rooms.items():
        if name.partition(".")[0] != package or room.stability == "internal":
            continue
        breaking = Level.MAJOR if room.stability == "stable" else Level.BREAKS_PROVISIONAL
        if name not in new.rooms:
            yield Change(breaking, f"{name} is gone")
            continue
        now = new.rooms[name].offers or ()
        for gone in sorted({*(room.offers or ())} - {*now}):
            yield Change(breaking, f"{name} does not offer {gone} any more")
        for change in griffe.find_breaking_changes(_at(old_tree, name), _at(new_tree, name)):
            # Names that are gone are told above, also where only the list was changed.
            if change.kind is not griffe.BreakageKind.OBJECT_REMOVED:
                yield Change(breaking, _one_line(griffe, change))
    yield from _additions(old, new, package)


def _additions(old: Packages, new: Packages, package: str) -> Iterator[Change]:
    for name, room in new.rooms.items():
        if name.partition(".")[0] != package or room.stability == "internal":
            continue
        before = _offered(old.rooms.get(name))
        for added in sorted({*(room.offers or ())} - before):
            yield Change(Level.MINOR, f"{name} offers {added}")


def _offered(room: Module | None) -> set[str]:
    return {*(room.offers or ())} if room is not None else set()


def _griffe(griffe: Any, root: Path, package: str) -> Any:
    """Return griffe's tree of a package, read as text, with the other packages beside it."""
    return griffe.load(
        package,
        search_paths=[str(path) for path in sorted(root.glob("packages/*/src"))],
        allow_inspection=False,
        resolve_aliases=True,
    )


def _at(tree: Any, name: str) -> Any:
    """Return a module of a tree by its dotted name."""
    for part in name.split(".")[1:]:
        tree = tree[part]
    return tree


def _one_line(griffe: Any, change: Any) -> str:
    """Return what griffe says of a change, without the place: that is in a temporary folder."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", change.explain(griffe.ExplanationStyle.ONE_LINE))
    return str(text).partition(": ")[2] or str(text)


def _last_release(root: Path, name: str) -> str:
    """Return the tag of the newest release of a distribution; empty if there is none."""
    tags = _git(root, "tag", "--list", f"{name}-v*").split()
    found = [(_version(tag.removeprefix(f"{name}-v")), tag) for tag in tags]
    return max(found, default=((0, 0, 0), ""))[1]


def _unpack(root: Path, revision: str, folder: Path) -> None:
    """Write the packages as they were at a revision."""
    command = ["git", "-C", str(root), "archive", revision, "packages"]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        # Filters came with Python 3.11.4; what Git packed of this repository is harmless.
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _name_and_version(project: str) -> tuple[str, Version]:
    table = tomllib.loads(project)["project"]
    return table["name"], _version(table["version"])


def _version(text: str) -> Version:
    parts: Sequence[int] = [int(part) for part in text.split(".")]
    major, minor, patch = parts
    return major, minor, patch


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def _has_history(changelog: Path, version: Version) -> bool:
    heading = re.compile(rf"^## {re.escape(_text(version))}\b", re.MULTILINE)
    return changelog.exists() and heading.search(changelog.read_text("utf-8")) is not None
