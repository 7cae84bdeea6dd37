"""A small repository with a package, for tests of the tools of the declared API."""

from __future__ import annotations

import subprocess
from pathlib import Path

from api.public import FILE

ROOM = '''"""Sums and products."""

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

#: Who reads what.
PUBLIC = """
[sums]
title = "Add"
about = "For those who add."

[sums.stable]
mine = ["add"]
"""

PROJECT = '[project]\nname = "mine"\nversion = "{version}"\n'


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


def make_repository(root: Path) -> Path:
    """A repository of one package with one room, and of a second package that uses it."""
    write(root, "packages/mine/pyproject.toml", PROJECT.format(version="1.2.3"))
    write(root, "packages/mine/CHANGELOG.md", "# Changelog\n\n## 1.2.3\n\n- First.\n")
    write(root, "packages/mine/src/mine/__init__.py", ROOM)
    write(root, "packages/mine/src/mine/behind.py", BEHIND)
    write(root, "packages/yours/src/yours/__init__.py", "from mine import add\n")
    write(root, str(FILE), PUBLIC)
    return root


def git(root: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *names, *arguments], check=True, capture_output=True)


def release(root: Path, version: str) -> None:
    if not (root / ".git").exists():
        git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "A release")
    git(root, "tag", f"mine-v{version}")
