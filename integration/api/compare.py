"""Find the API changes of each package since its last release, and the version that they require.

A release of a package is a tag `NAME-vX.Y.Z`, such as `sbp-core-v0.1.0`. Griffe finds changes of
the names that were public at the release (`public.toml`); internal names do not count. Versions
follow https://semver.org:

| change | 0.Y.Z becomes | X.Y.Z becomes |
|---|---|---|
| a stable name is removed, less stable, or has another signature | 0.(Y+1).0 | (X+1).0.0 |
| a provisional name is removed, internal, or has another signature | 0.(Y+1).0 | X.(Y+1).0 |
| a name becomes public | 0.Y.(Z+1) | X.(Y+1).0 |
| no such change | unchanged | unchanged |
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from api.public import FILE, Public
from api.rooms import Packages

Version = tuple[int, int, int]


class Level(IntEnum):
    """The effect of a change on the version.

    `MINOR` is an addition. `BREAKS_PROVISIONAL` is also a minor version, but before version 1 it
    counts like `MAJOR`, so that ranges such as `>=0.1,<0.2` exclude it.
    """

    NOTHING = 0
    PATCH = 1
    MINOR = 2
    BREAKS_PROVISIONAL = 3
    MAJOR = 4


#: The printed names of levels.
_LABELS = {Level.MINOR: "new", Level.BREAKS_PROVISIONAL: "breaks", Level.MAJOR: "breaks"}


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the API.

    Args:
        level: Its effect on the version, from version 1 on.
        what: The change, in one line.
    """

    level: Level
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of comparing one package.

    Args:
        name: Name of the distribution.
        release: The git revision of the comparison; empty if nothing was released.
        released, version: The released version, and the present one in `pyproject.toml`.
        wanted: The least version that the changes allow.
        changes: The changes.
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
        """Whether the present version is high enough."""
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
        folder: Folder of the only package to compare; `*` for all.
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
            if not old_project.exists():  # a new package
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
        # Before version 1, each change counts one place further to the right.
        breaks = level >= Level.BREAKS_PROVISIONAL
        return (0, minor + 1, 0) if breaks else (0, minor, patch + 1)
    if level is Level.MAJOR:
        return major + 1, 0, 0
    return (major, minor, patch + 1) if level is Level.PATCH else (major, minor + 1, 0)


def _changes(old_root: Path, new_root: Path, package: str) -> Iterator[Change]:
    """Yield the changes of the public names of a package."""
    import griffe  # in the session `api` only

    old, new = _promises(old_root, package), _promises(new_root, package)
    offered = Packages.below(new_root).rooms
    old_tree, new_tree = (_griffe(griffe, root, package) for root in (old_root, new_root))
    for room, names in old.items():
        if room not in offered:
            yield Change(max(map(_breaking, names.values())), f"{room} is gone")
            continue
        for name, word in sorted(names.items()):
            now = new.get(room, {}).get(name, "internal")
            if name not in (offered[room].offers or ()):
                yield Change(_breaking(word), f"{room} does not offer {name} any more")
            elif (now != word and word == "stable") or now == "internal":
                yield Change(_breaking(word), f"{room}.{name} is {now} now")
        # Griffe names an object by its definition; public names are those of rooms.
        homes = {_home(old_tree, room, name): word for name, word in names.items()}
        for change in griffe.find_breaking_changes(_at(old_tree, room), _at(new_tree, room)):
            path = change.obj.canonical_path
            word = next((homes[one] for one in homes if f"{path}.".startswith(f"{one}.")), "")
            is_told = change.kind is griffe.BreakageKind.OBJECT_REMOVED and path in homes
            if word and not is_told:
                yield Change(_breaking(word), _one_line(griffe, change))
    for room, names in new.items():
        for name in sorted({*names} - {*old.get(room, ())}):
            yield Change(Level.MINOR, f"{room} offers {name}")


def _breaking(word: str) -> Level:
    """Return the level of a change that breaks a name of a stability."""
    return Level.MAJOR if word == "stable" else Level.BREAKS_PROVISIONAL


def _promises(root: Path, package: str) -> dict[str, Mapping[str, str]]:
    """Return the stability of each public name of a package, by room and name."""
    public, rooms = Public.below(root), Packages.below(root).rooms
    found: dict[str, Mapping[str, str]] = {}
    for room, module in rooms.items():
        if room.partition(".")[0] != package:
            continue
        names = public.of_room(room)
        if not (root / FILE).exists():  # until 0.1, the docstring of a room covered all its names
            told = re.search(r"^Stability: (stable|provisional)\.$", module.docstring, re.MULTILINE)
            names = dict.fromkeys(module.offers or () if told else (), told[1] if told else "")
        if names:
            found[room] = names
    return found


def _home(tree: Any, room: str, name: str) -> str:
    """Return the dotted name at which a room's name is defined; its name in the room if unknown."""
    try:
        return str(_at(tree, room)[name].canonical_path)
    except Exception:  # an error of griffe: a missing name, or a broken alias
        return f"{room}.{name}"


def _griffe(griffe: Any, root: Path, package: str) -> Any:
    """Return griffe's tree of a package, read as text, together with the other packages."""
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
    """Return griffe's description of a change, without the place in a temporary folder."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", change.explain(griffe.ExplanationStyle.ONE_LINE))
    return str(text).partition(": ")[2] or str(text)


def _last_release(root: Path, name: str) -> str:
    """Return the tag of the newest release of a distribution; empty if there is none."""
    tags = _git(root, "tag", "--list", f"{name}-v*").split()
    found = [(_version(tag.removeprefix(f"{name}-v")), tag) for tag in tags]
    return max(found, default=((0, 0, 0), ""))[1]


def _unpack(root: Path, revision: str, folder: Path) -> None:
    """Write the packages of a revision, and their declaration of public names."""
    paths = _git(root, "ls-tree", "-r", "--name-only", revision, "packages", str(FILE)).split("\n")
    declared = [str(FILE)] if str(FILE) in paths else []
    command = ["git", "-C", str(root), "archive", revision, "packages", *declared]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        # Filters need Python 3.11.4; an archive that Git made of this repository is harmless.
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
