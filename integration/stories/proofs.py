"""The classes of stories: criteria, and their proofs."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

#: The root of the repository.
ROOT = Path(__file__).resolve().parent.parent.parent

#: The option with which nox finds its sessions from another folder.
NOXFILE = ("--noxfile", str(ROOT / "noxfile.py"))


@dataclass(frozen=True, slots=True)
class NamedTests:
    """Tests of a file.

    Args:
        folder: The folder in which pytest runs, from the root: `packages/launch`.
        file: The file without `tests/` and `.py`.
        names: Names of functions; none for all tests of the file.
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
        """The arguments of pytest, in its folder."""
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
    """A program that tries something many times; its exit code is 0 if all cases hold.

    Args:
        words: The command, run in `integration`; `python` is this Python, and `JSON` a file for
            its outcomes.
        counted: A pattern for the number of cases in its output, with one group of digits. A list
            in the file `JSON` is counted without it.
    """

    words: tuple[str, ...]
    counted: str = ""

    def __str__(self) -> str:
        hidden = ("python", "-m", "--json", "JSON", *NOXFILE)
        words = [word for word in self.words if word not in hidden]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Missing:
    """A criterion without a proof so far.

    Args:
        why: What exists instead, or the missing prerequisite.
    """

    why: str

    def __str__(self) -> str:
        return self.why


Proof = NamedTests | Command | Missing


@dataclass(frozen=True, slots=True)
class Criterion:
    """A testable sentence, and its proofs."""

    text: str
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """The wish of a user, and the criteria for its fulfilment."""

    number: int
    title: str
    criteria: tuple[Criterion, ...]


def story(number: int, title: str, criteria: dict[str, tuple[Proof, ...]]) -> Story:
    """Return a story of criteria by their text."""
    return Story(number, title, tuple(Criterion(*each) for each in criteria.items()))


def integration(file: str, *names: str) -> NamedTests:
    """Return tests that involve several packages."""
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
