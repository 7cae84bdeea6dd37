"""What keeps a package from being released, and what a release leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from api_repository import PUBLIC, ROOM, git, write

import release
from api.public import FILE

PROJECT = """[project]
name = "sbp-mine"
version = "{version}"
urls = {{ Homepage = "https://example.org/mine" }}
"""

CHANGES = "# Changelog of mine\n\n## {version} (2026-11-30)\n\n- First.\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one package that can be released as 0.2.0; its building is made up."""
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(name, "a")
    for name in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@b")
    monkeypatch.setattr(release, "build", lambda root, package: [root / "dist" / "mine.whl"])
    root = tmp_path / "copy"
    write(root, "packages/mine/pyproject.toml", PROJECT.format(version="0.2.0"))
    write(root, "packages/mine/CHANGELOG.md", CHANGES.format(version="0.2.0"))
    write(root, "packages/mine/src/sbp_mine/__init__.py", ROOM.replace("mine.", "sbp_mine."))
    write(root, "packages/mine/src/sbp_mine/behind.py", "def add(a, b):\n    return a + b\n")
    write(root, str(FILE), PUBLIC.replace("mine =", "sbp_mine ="))
    git(root, "init", "--quiet")
    commit(root)
    return root


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "A change")


def tags(root: Path) -> list[str]:
    return release.git(root, "tag").split()


@pytest.mark.parametrize("name", ["mine", "sbp-mine"])
def test_a_package_that_is_ready_is_built_and_tagged_and_nothing_is_pushed(
    repository: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    git(repository, "remote", "add", "origin", str(repository.parent / "none"))

    assert release.main([name], repository) == 0

    assert tags(repository) == ["sbp-mine-v0.2.0"]
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["built dist/mine.whl", "tagged sbp-mine-v0.2.0"]
    assert "example.org" in said[2]
    assert said[3].startswith("nothing was pushed or uploaded")


def leave(root: Path) -> None:
    write(root, "packages/mine/README.md", "new")


def tag(root: Path) -> None:
    git(root, "tag", "sbp-mine-v0.2.0")


def tag_higher(root: Path) -> None:
    git(root, "tag", "sbp-mine-v0.3.0")
    write(root, "packages/mine/README.md", "new")
    commit(root)


def without_heading(root: Path) -> None:
    write(root, "packages/mine/CHANGELOG.md", CHANGES.format(version="0.2.0.1"))
    commit(root)


def without_day(root: Path) -> None:
    text = CHANGES.format(version="0.2.0").replace("2026-11-30", "unreleased")
    write(root, "packages/mine/CHANGELOG.md", text)
    commit(root)


def break_the_api(root: Path) -> None:
    git(root, "tag", "sbp-mine-v0.2.0")
    write(root, "packages/mine/pyproject.toml", PROJECT.format(version="0.2.1"))
    write(root, "packages/mine/CHANGELOG.md", CHANGES.format(version="0.2.1"))
    write(root, "packages/mine/src/sbp_mine/__init__.py", ROOM.replace('["add"]', "[]"))
    commit(root)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (leave, "1 files are not committed, such as packages/mine/README.md"),
        (tag, "the tag sbp-mine-v0.2.0 exists: raise the version"),
        (tag_higher, "0.2.0 is no higher than what sbp-mine-v0.3.0 released"),
        (without_heading, "the changelog has no heading for 0.2.0: write ## 0.2.0 ("),
        (without_day, "the changelog says '## 0.2.0 (unreleased)', without a day"),
        (break_the_api, "the changes ask for version 0.3.0 or higher"),
    ],
)
def test_a_package_that_is_not_ready_is_refused_with_what_to_do(
    repository: Path,
    change: Callable[[Path], None],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(repository)
    before = tags(repository)

    assert release.main(["mine"], repository) == 1

    assert says in capsys.readouterr().err
    assert tags(repository) == before


def test_a_package_that_cannot_be_built_is_not_tagged(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(root: Path, package: object) -> list[Path]:
        release.run(root, "false")
        return []

    monkeypatch.setattr(release, "build", build)

    assert release.main(["mine"], repository) == 1
    assert capsys.readouterr().err == "it ended with exit code 1: false\n"
    assert tags(repository) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sbp-mien"], "did you mean sbp-mine?"),
        (["other"], "choose one of mine, sbp-mine"),
        ([], "name one package"),
        (["mine", "sbp-mine"], "name one package"),
    ],
)
def test_what_names_no_package_is_refused(
    repository: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(words, repository) == 1
    assert says in capsys.readouterr().err
