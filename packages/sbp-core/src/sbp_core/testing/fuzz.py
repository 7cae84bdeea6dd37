"""Fuzz tests of file readers: an edited file is accepted, or refused by an `SbpError`, soon.

    kind = FileKind(name="my file", suffix=".json", originals=..., use=MyFile.load)
    for seed in range(10_000):
        assert not try_edit(kind, seed, folder).fault

An edit is a function of its seed, so a fault can be reproduced. A reader that never returns, or
uses up all memory, also blocks or kills the testing process: `python -m fuzz` in `integration`
tests in processes that are watched.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from sbp_core.errors import SbpError
from sbp_core.serialize import pyyaml
from sbp_core.testing.edits import edited, edited_bytes, edited_text

__all__ = ["MOST_S", "EditOutcome", "FileKind", "edited_file", "try_edit"]

#: Most CPU seconds for a file of the size of these.
MOST_S = 20.0

#: Most characters of a traceback that is shown.
_SHOWN = 2000


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of untrusted file.

    Args:
        name: The name of the kind.
        suffix: The suffix of its files; `.json` and `.yaml` are edited as values, too.
        originals: Returns valid files.
        use: Reads a file and uses it like a user would. It may only raise an `SbpError` naming the
            file.
        names_place: Whether every refusal has to name the file or a part of it.
        edit: Makes one edit of a value, for files that are edited as values.
    """

    name: str
    suffix: str
    originals: Callable[[], Sequence[bytes]]
    use: Callable[[Path], object]
    names_place: bool = True
    edit: Callable[[Any, Random], Any] = edited


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOutcome:
    """The outcome of one edit.

    Args:
        seed: The seed of the edit.
        error: The type of the exception; empty if the file was accepted.
        fault: The fault, such as the traceback of an error that is not ours; empty if none.
        time_s: CPU seconds.
    """

    seed: int
    error: str
    fault: str
    time_s: float


def edited_file(kind: FileKind, seed: int) -> bytes:
    """Return a file of a kind with one to three random edits."""
    random = Random(f"{kind.name} {seed}")
    data = random.choice(_originals(kind))
    num_edits = random.choice([1, 1, 1, 2, 3])
    way = random.random()
    if kind.suffix not in _VALUES or way < 0.1:
        for _ in range(num_edits):
            data = edited_bytes(data, random)
        return data
    text = data.decode("utf-8")
    if way < 0.35:
        for _ in range(num_edits):
            text = edited_text(text, random)
        return text.encode("utf-8", "surrogatepass")
    read, written = _VALUES[kind.suffix]
    value = read(text)
    for _ in range(num_edits):
        value = kind.edit(value, random)
    return written(value).encode("utf-8", "surrogatepass")


@cache
def _originals(kind: FileKind) -> Sequence[bytes]:
    return kind.originals()


def _yaml_value(text: str) -> Any:
    return pyyaml().safe_load(text)


def _yaml_text(value: Any) -> str:
    text: str = pyyaml().safe_dump(value, sort_keys=False)
    return text


#: Functions that read and write files of values, by suffix.
_VALUES: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".json": (json.loads, json.dumps),
    ".yaml": (_yaml_value, _yaml_text),
}


def try_edit(kind: FileKind, seed: int, folder: Path) -> EditOutcome:
    """Edit a file, use it, and return the outcome.

    Args:
        kind: The kind of the file.
        seed: The seed of the edit.
        folder: The folder for the file; existing files of its name are replaced.
    """
    path = folder / f"edited{kind.suffix}"
    path.write_bytes(edited_file(kind, seed))
    error, fault, begin = "", "", process_time()
    try:
        kind.use(path)
    except SbpError as refused:
        error = type(refused).__name__
        fault = _unclear(refused, path, kind)
    except Exception as raw:
        error = type(raw).__name__
        # The innermost calls are most informative, and a recursion has many.
        fault = "not an error of ours: " + traceback.format_exc(limit=-8)[-_SHOWN:]
    time_s = process_time() - begin
    if time_s > MOST_S and not fault:
        fault = f"took {time_s:.1f} s"
    return EditOutcome(seed=seed, error=error, fault=fault, time_s=time_s)


def _unclear(refused: SbpError, path: Path, kind: FileKind) -> str:
    """Return what is missing in a refusal, or an empty text."""
    text = str(refused)
    if not refused.what:
        return "a refusal says nothing"
    if kind.names_place and not any(refused.where) and str(path) not in text:
        return f"a refusal names no place: {text[:_SHOWN]}"
    if len(text) > 100_000:
        return f"a refusal has {len(text)} letters: {text[:_SHOWN]}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"a refusal cannot be printed: {ascii(text)[:_SHOWN]}"
    return ""
