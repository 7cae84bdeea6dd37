"""Files with random edits, given to what reads them: used, or refused by an error of ours, soon.

    kind = FileKind(name="my file", suffix=".json", originals=..., use=MyFile.load)
    for seed in range(10_000):
        assert not try_edit(kind, seed, folder).fault

An edit is a function of its seed, so what was found is found again. A reader that never returns, or
takes all memory, takes the process that tries it along: `python -m fuzz` in `integration` tries in
processes that are watched.
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

#: Seconds of the processor that no file of the size of these may take.
MOST_S = 20.0

#: Letters of a message that is shown.
_SHOWN = 2000


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file that comes from elsewhere.

    Args:
        name: Of the kind.
        suffix: Of its files; `.json` and `.yaml` are edited as values, too, others as bytes.
        originals: Returns files that are right.
        use: Reads a file and does with it what a user would. What it raises should be an
            `SbpError` that names the file.
        names_place: Whether every refusal has to name the file or a part of it.
        edit: Makes one edit of a value, where files are edited as values.
    """

    name: str
    suffix: str
    originals: Callable[[], Sequence[bytes]]
    use: Callable[[Path], object]
    names_place: bool = True
    edit: Callable[[Any, Random], Any] = edited


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOutcome:
    """What came of one edit.

    Args:
        seed: Of the edit.
        error: Type of what was raised; empty if the file was used.
        fault: What is wrong with that, such as the traceback of an error that is not ours; empty
            if nothing is.
        time_s: Seconds of the processor.
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


#: How files of values are read and written, by their suffix.
_VALUES: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".json": (json.loads, json.dumps),
    ".yaml": (_yaml_value, _yaml_text),
}


def try_edit(kind: FileKind, seed: int, folder: Path) -> EditOutcome:
    """Edit a file, use it, and return what came of it.

    Args:
        kind: Of the file.
        seed: Of the edit.
        folder: Where the file is put; others with its name are replaced.
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
        # The innermost calls say most, and a recursion has many.
        fault = "not an error of ours: " + traceback.format_exc(limit=-8)[-_SHOWN:]
    time_s = process_time() - begin
    if time_s > MOST_S and not fault:
        fault = f"took {time_s:.1f} s"
    return EditOutcome(seed=seed, error=error, fault=fault, time_s=time_s)


def _unclear(refused: SbpError, path: Path, kind: FileKind) -> str:
    """Return what a refusal lacks, or an empty text."""
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
