"""Versions that changes of the declared API ask for, on repositories made up for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_repository import BEHIND, PROJECT, PUBLIC, ROOM, git, make_repository, release, write

import api.__main__
from api.compare import Level, compare, next_version
from api.public import FILE


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


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
        ("__init__.py", '["add"]', '["add", "behind"]', (1, 2, 3), ""),
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


def test_what_breaks_a_provisional_name_asks_for_a_minor_version(repository: Path) -> None:
    write(repository, str(FILE), PUBLIC.replace("stable", "provisional"))
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", ROOM.replace('["add"]', "[]"))

    (verdict,) = compare(repository)

    assert verdict.wanted == (1, 3, 0)
    assert "breaks mine does not offer add any more" in str(verdict)


@pytest.mark.parametrize(
    ("old", "new", "wanted", "what"),
    [
        ('stable]\nmine = ["add"]', "stable]", (2, 0, 0), "breaks mine.add is internal now"),
        ("stable]", "provisional]", (2, 0, 0), "breaks mine.add is provisional now"),
        ('["add"]', '["add", "secret"]', (1, 3, 0), "new    mine offers secret"),
    ],
)
def test_a_promise_that_is_given_or_taken_back_is_a_change(
    repository: Path, old: str, new: str, wanted: tuple[int, int, int], what: str
) -> None:
    room = ROOM.replace("import add", "import add, secret").replace('["add"]', '["add", "secret"]')
    write(repository, "packages/mine/src/mine/__init__.py", room)
    release(repository, "1.2.3")
    write(repository, str(FILE), PUBLIC.replace(old, new))

    (verdict,) = compare(repository)

    assert verdict.wanted == wanted
    assert what in str(verdict)


def test_a_method_of_a_public_class_counts_and_other_names_of_its_module_do_not(
    repository: Path,
) -> None:
    path = repository / "packages/mine/src/mine/behind.py"
    path.write_text(BEHIND + "\n\nclass add:\n    def of(self, a):\n        return a\n", "utf-8")
    release(repository, "1.2.3")
    path.write_text(path.read_text("utf-8").replace("of(self, a)", "of(self)"), "utf-8")

    (verdict,) = compare(repository)

    assert verdict.wanted == (2, 0, 0)


def test_a_release_from_before_the_declaration_goes_by_its_docstrings(repository: Path) -> None:
    told = ROOM.replace('products."""', 'products.\n\nStability: stable.\n"""')
    write(repository, "packages/mine/src/mine/__init__.py", told)
    (repository / FILE).unlink()
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", ROOM)
    write(repository, str(FILE), PUBLIC)

    (same,) = compare(repository)
    write(repository, str(FILE), "")
    (without,) = compare(repository)

    assert same.changes == ()
    assert without.wanted == (2, 0, 0)


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


def test_internal_names_may_change(repository: Path) -> None:
    write(repository, str(FILE), "")
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", ROOM.replace('["add"]', "[]"))

    (verdict,) = compare(repository)

    assert verdict.ok
    assert verdict.changes == ()
