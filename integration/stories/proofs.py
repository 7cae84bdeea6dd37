"""What a story is: its criteria, and what proves each."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

#: Of the repository.
ROOT = Path(__file__).resolve().parent.parent.parent

#: Where nox finds its sessions from another folder.
NOXFILE = ("--noxfile", str(ROOT / "noxfile.py"))


@dataclass(frozen=True, slots=True)
class NamedTests:
    """Tests of a file.

    Args:
        folder: From the root of the repository to where pytest runs: `packages/launch`.
        file: Without `tests/` and `.py`.
        names: Of functions; all tests of the file if there are none.
    """

    folder: str
    file: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = "" if self.folder == "integration" else f"{Path(self.folder).name}/"
        count = len(self.names)
        return (
            where + self.file + (f": {count} {'test' if count == 1 else 'tests'}" if count else "")
        )

    @property
    def ids(self) -> tuple[str, ...]:
        """What pytest is given, in its folder."""
        path = f"tests/{self.file}.py"
        return tuple(f"{path}::{name}" for name in self.names) or (path,)

    def missing(self) -> list[str]:
        """Return the names that the file does not define."""
        path = ROOT / self.folder / "tests" / f"{self.file}.py"
        if not path.exists():
            return [str(path.relative_to(ROOT))]
        body = ast.parse(path.read_text("utf-8")).body
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        return [name for name in self.names if name not in defined]


@dataclass(frozen=True, slots=True)
class Command:
    """A program that tries something many times; its exit code says whether it holds.

    Args:
        words: Run in `integration`; `python` is this one, and `JSON` a file for its outcomes.
        counted: What its output says of the number of cases, with one group of digits. A list in
            the file `JSON` counts without it.
    """

    words: tuple[str, ...]
    counted: str = ""

    def __str__(self) -> str:
        hidden = ("python", "-m", "--json", "JSON", *NOXFILE)
        words = [word for word in self.words if word not in hidden]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Missing:
    """What nothing proves yet.

    Args:
        why: What there is instead, or what it waits for.
    """

    why: str

    def __str__(self) -> str:
        return self.why


Proof = NamedTests | Command | Missing


@dataclass(frozen=True, slots=True)
class Criterion:
    """A sentence that can be tried, and what tries it."""

    text: str
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """What somebody wants, and when they have it."""

    number: int
    title: str
    criteria: tuple[Criterion, ...]


def story(number: int, title: str, criteria: dict[str, tuple[Proof, ...]]) -> Story:
    """Return a story of criteria by their text."""
    return Story(number, title, tuple(Criterion(*each) for each in criteria.items()))


def integration(file: str, *names: str) -> NamedTests:
    """Return tests that know several packages."""
    return NamedTests("integration", file, names)


def package(folder: str, file: str, *names: str) -> NamedTests:
    """Return tests of a package."""
    return NamedTests(f"packages/{folder}", file, names)


def python(*words: str, counted: str = "") -> Command:
    """Return a program of `integration`."""
    return Command(("python", "-m", *words), counted)


def nox(*words: str) -> Command:
    """Return a session of nox."""
    return Command(("python", "-m", "nox", *NOXFILE, "-s", *words))
