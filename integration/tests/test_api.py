"""The tools of the declared API, on repositories made up for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import api.__main__
from api.compare import Level, compare, next_version
from api.document import document
from api.imports import faults
from api.rooms import Packages

ROOM = '''"""Sums and products.

Stability: stable.
"""

from mine.behind import add

__all__ = ["add"]
'''

BEHIND = '''"""Where the names of the room are defined."""


def add(a, b):
    """Return the sum."""
    return a + b


def secret():
    """Return nothing."""
'''

PROJECT = '[project]\nname = "mine"\nversion = "{version}"\n'


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one package with one room, and of a second package that uses it."""
    write(tmp_path, "packages/mine/pyproject.toml", PROJECT.format(version="1.2.3"))
    write(tmp_path, "packages/mine/CHANGELOG.md", "# Changelog\n\n## 1.2.3\n\n- First.\n")
    write(tmp_path, "packages/mine/src/mine/__init__.py", ROOM)
    write(tmp_path, "packages/mine/src/mine/behind.py", BEHIND)
    write(tmp_path, "packages/yours/src/yours/__init__.py", "from mine import add\n")
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *names, *arguments], check=True, capture_output=True)


def release(root: Path, version: str) -> None:
    if not (root / ".git").exists():
        git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "A release")
    git(root, "tag", f"mine-v{version}")


def test_an_import_from_a_room_is_no_fault(repository: Path) -> None:
    assert list(faults(Packages.below(repository))) == []


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("from mine.behind import add", "mine.behind is private; import from mine"),
        ("from mine import behind", "mine.behind is private; import from mine"),
        ("import mine.behind", "mine.behind is private; import from mine"),
        ("from mine import secret", "mine does not offer 'secret'"),
        ("def f():\n    from mine.behind import secret", "mine.behind is private"),
    ],
)
def test_an_import_from_behind_a_room_is_told_with_the_line(
    repository: Path, statement: str, what: str
) -> None:
    write(repository, "packages/yours/src/yours/__init__.py", f"\n{statement}\n")

    (fault,) = faults(Packages.below(repository))

    assert what in fault.what
    assert str(fault.path) == "packages/yours/src/yours/__init__.py"
    assert fault.line == statement.count("\n") + 2


def test_a_package_may_look_behind_its_own_rooms(repository: Path) -> None:
    write(repository, "packages/mine/src/mine/other.py", "from mine.behind import secret\n")

    assert list(faults(Packages.below(repository))) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('["add"]', '["add", "lost"]', "offers 'lost', and has no such name"),
        ("Stability: stable.", "Stability: marble.", "no line 'Stability: stable.'"),
        ("\nStability: stable.\n", "", "no line 'Stability: stable.'"),
    ],
)
def test_a_room_that_is_not_in_order_is_told(
    repository: Path, old: str, new: str, what: str
) -> None:
    write(repository, "packages/mine/src/mine/__init__.py", ROOM.replace(old, new))

    (fault,) = faults(Packages.below(repository))

    assert what in fault.what


@pytest.mark.parametrize(
    ("released", "level", "wanted"),
    [
        ((0, 3, 1), Level.NOTHING, (0, 3, 1)),
        ((0, 3, 1), Level.MINOR, (0, 3, 2)),
        ((0, 3, 1), Level.BREAKS_PROVISIONAL, (0, 4, 0)),
        ((0, 3, 1), Level.MAJOR, (0, 4, 0)),
        ((1, 3, 1), Level.MINOR, (1, 4, 0)),
        ((1, 3, 1), Level.BREAKS_PROVISIONAL, (1, 4, 0)),
        ((1, 3, 1), Level.MAJOR, (2, 0, 0)),
    ],
)
def test_versions_go_up_as_semantic_versioning_says(
    released: tuple[int, int, int], level: Level, wanted: tuple[int, int, int]
) -> None:
    assert next_version(released, level) == wanted


def test_without_a_release_there_is_nothing_to_compare(repository: Path) -> None:
    git(repository, "init", "--quiet")

    (verdict,) = compare(repository)

    assert verdict.ok
    assert str(verdict) == "mine 1.2.3: nothing of it was released"


@pytest.mark.parametrize(
    ("file", "old", "new", "wanted", "what"),
    [
        ("behind.py", "def secret", "def secrets", (1, 2, 3), ""),
        ("behind.py", "def add(a, b)", "def add(a, b, c)", (2, 0, 0), "Parameter was added"),
        ("behind.py", "def add(a, b)", "def add(a, b, c=0)", (1, 2, 3), ""),
        ("__init__.py", '["add"]', "[]", (2, 0, 0), "mine does not offer add any more"),
        ("__init__.py", '["add"]', '["add", "behind"]', (1, 3, 0), "mine offers behind"),
    ],
)
def test_a_change_asks_for_the_version_that_it_should(
    repository: Path, file: str, old: str, new: str, wanted: tuple[int, int, int], what: str
) -> None:
    release(repository, "1.2.3")
    path = repository / "packages/mine/src/mine" / file
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")

    (verdict,) = compare(repository)

    assert verdict.wanted == wanted
    assert what in " ".join(change.what for change in verdict.changes)
    assert verdict.ok == (wanted == (1, 2, 3))


def test_a_version_that_does_needs_its_heading_in_the_changelog(repository: Path) -> None:
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", ROOM.replace('["add"]', "[]"))
    write(repository, "packages/mine/pyproject.toml", PROJECT.format(version="2.0.0"))

    (without,) = compare(repository)
    write(repository, "packages/mine/CHANGELOG.md", "# Changelog\n\n## 2.0.0\n\n- `add` is gone.\n")
    (with_heading,) = compare(repository)

    assert not without.ok
    assert "the changelog has no heading for this version" in str(without)
    assert with_heading.ok


def test_what_breaks_a_provisional_room_asks_for_a_minor_version(repository: Path) -> None:
    provisional = ROOM.replace("stable", "provisional")
    write(repository, "packages/mine/src/mine/__init__.py", provisional)
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", provisional.replace('["add"]', "[]"))

    (verdict,) = compare(repository)

    assert verdict.wanted == (1, 3, 0)
    assert "breaks mine does not offer add any more" in str(verdict)


def test_a_copy_without_tags_of_releases_is_refused_and_not_taken_for_unchanged(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api.__main__, "ROOT", repository)
    git(repository, "init", "--quiet")

    without = api.__main__.main(["compare"])
    said = capsys.readouterr().out
    release(repository, "1.2.3")

    assert without == 1
    assert "nothing was compared" in said and "git fetch --tags" in said
    assert api.__main__.main(["compare"]) == 0


def test_internal_rooms_may_change(repository: Path) -> None:
    internal = ROOM.replace("stable", "internal")
    write(repository, "packages/mine/src/mine/__init__.py", internal)
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", internal.replace('["add"]', "[]"))

    (verdict,) = compare(repository)

    assert verdict.ok
    assert verdict.changes == ()


PLANNER = '''"""What planners are, and how they are tested.

Stability: stable.
"""

from abc import ABC, abstractmethod
from typing import Protocol

__all__ = ["Planner", "PlannerConformance"]


class Planner(Protocol):
    """Plans."""

    quick: bool = True

    def plan(self, request: int) -> Plan:
        """Return a plan."""


class Plan(ABC):
    """What a planner returns."""

    @abstractmethod
    def cost(self) -> float:
        """Return what it costs."""

    def describe(self):
        """Return nothing."""

    def _hidden(self):
        """Return nothing."""


class PlannerConformance(ABC):
    """What every planner must do."""

    @abstractmethod
    def make_planner(self):
        """Return a planner."""

    def test_it_plans(self):
        """Not to be written by the author of a planner."""
'''

HOOKS = '''
KINDS = {"planner": "mine_planners"}


class HookSpecs:
    def mine_planners(self):
        """Planners: `mine.planner.Planner`.

        Suite: `mine.planner.PlannerConformance`.
        """
'''


@pytest.fixture
def with_hooks(repository: Path) -> Path:
    """The same repository, with a hook for planners."""
    write(repository, "packages/core/src/sbp_core/plugins/hooks.py", HOOKS)
    for folder in ("sbp_core", "sbp_core/plugins"):
        write(repository, f"packages/core/src/{folder}/__init__.py", "")
    write(repository, "packages/mine/src/mine/planner.py", PLANNER)
    return repository


def test_the_page_has_a_line_a_name(with_hooks: Path) -> None:
    lines = document(Packages.below(with_hooks)).splitlines()

    assert "Sums and products. *stable*" in lines
    assert "- `add(a, b)`: Return the sum." in lines


def test_the_page_says_what_a_plugin_author_writes_and_which_suite_tests_it(
    with_hooks: Path,
) -> None:
    lines = document(Packages.below(with_hooks)).splitlines()

    assert (
        "| planner | `mine_planners` | Planners: `mine.planner.Planner`. "
        "| `mine.planner.PlannerConformance`: `make_planner` |"
    ) in lines


def test_the_page_has_the_methods_of_what_a_plugin_supplies_and_of_what_they_return(
    with_hooks: Path,
) -> None:
    page = document(Packages.below(with_hooks))

    assert page.partition("```text\n# kind planner\n")[2].partition("\n\n")[0].splitlines() == [
        "class Planner(Protocol):",
        "    quick: bool = True",
        "    def plan(self, request: int) -> Plan: ...",
        "class Plan(ABC):",
        "    def cost(self) -> float: ...",
        "    def describe(self): ...  # has a default",
    ]


@pytest.mark.parametrize("name", ["Planner", "PlannerConformance"])
def test_a_hook_that_names_what_no_room_offers_is_refused(with_hooks: Path, name: str) -> None:
    write(
        with_hooks,
        "packages/core/src/sbp_core/plugins/hooks.py",
        HOOKS.replace(f"mine.planner.{name}`", f"mine.behind.{name}`"),
    )

    with pytest.raises(LookupError, match=f"mine.behind.{name}, which no room offers"):
        document(Packages.below(with_hooks))
