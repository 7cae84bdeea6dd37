"""`Document`: reads and writes JSON files such as `{"format": "sbp-plan", "version": 2, ...}`.

Plans, graphs, clusters and strategies are such files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from sbp_core.errors import SbpError, SbpValueError
from sbp_core.serialize.file import MOST_BYTES, read_text
from sbp_core.serialize.lines import Lines, in_line, json_parts, repeated_key_line, word_line
from sbp_core.serialize.misfit import shown
from sbp_core.serialize.typed import dump, load

T = TypeVar("T")

#: Approximate characters of a line in a file that people read.
_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Generic[T]):
    """A kind of file.

    Reading one needs bounded memory: `most_bytes` of text, and some 30 times as much for the value.

    Args:
        kind: The class of the value in it.
        format: The name of the format in the file.
        version: The version of the layout; other versions are not read.
        todo: The advice for a file that cannot be read.
        error: The class of errors.
        most_bytes: The largest size of a file.
    """

    kind: type[T]
    format: str
    version: int
    todo: str
    error: type[SbpError] = SbpValueError
    most_bytes: int = MOST_BYTES

    def dump(self, value: T) -> dict[str, Any]:
        """Return the JSON value of a whole file."""
        return {"format": self.format, "version": self.version, **dump(value, self.kind)}

    def load(self, value: object, where: str | Lines = "") -> T:
        """Read the result of `dump`.

        Args:
            value: A JSON value.
            where: The file that it comes from, or its lines, for messages.

        Raises:
            SbpError: `error`: it is of another kind or version, or a part is missing or invalid.
        """
        name = f"{self.format.removeprefix('sbp-')} file"
        if not isinstance(value, dict):
            what = f"this is no {name}: it is {shown(value)}"
            place = where if isinstance(where, str) else where.where([])
            raise self.error(what, where=place, accepted="a JSON object", todo=self.todo)
        for key, wanted in (("format", self.format), ("version", self.version)):
            found = value.get(key)
            if type(found) is not type(wanted) or found != wanted:
                raise self.error(
                    f"this is no {name} of this version: its {key} is {shown(found)}",
                    where=where if isinstance(where, str) else where.where([key]),
                    accepted=f'"{key}": {json.dumps(wanted)}',
                    todo=self.todo,
                )
        rest = {key: part for key, part in value.items() if key not in ("format", "version")}
        root = f"the {name}"
        return load(rest, self.kind, root=root, where=where, error=self.error, todo=self.todo)

    def read(self, path: Path) -> T:
        """Read a file.

        Raises:
            SbpError: `error`: it cannot be read; see `load`.
        """
        return self.read_with_lines(path)[0]

    def read_with_lines(self, path: Path) -> tuple[T, Lines]:
        """Read a file; return also the lines of its parts.

        Raises:
            SbpError: `error`: it cannot be read; see `load`.
        """
        text = read_text(path, most_bytes=self.most_bytes, error=self.error, todo=self.todo)
        lines = Lines(str(path), partial(json_parts, text))
        value = parse(text, where=str(path), error=self.error, todo=self.todo)
        return self.load(value, lines), lines

    def write(self, value: T, path: Path) -> None:
        """Write a file for people to read and edit: one line for each part without objects."""
        path.write_text(_pretty(self.dump(value)) + "\n", encoding="utf-8")


def parse(
    text: str, *, where: str = "", error: type[SbpError] = SbpValueError, todo: str = ""
) -> Any:
    """Return the value of a JSON text.

    Raises:
        SbpError: `error`: it is not JSON, or a key occurs twice in one object; names the line.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except json.JSONDecodeError as cause:
        place = f"{in_line(where, cause.lineno)}, column {cause.colno}"
        raise error(f"this is no JSON: {cause.msg}", where=place, todo=todo) from cause
    # The line of an error is searched up to its position: the rest of the text may be huge.
    except _NoNumberError as cause:
        line = word_line(text, cause.word)
        what = f"this is no JSON: {cause.word} is no number of JSON"
        raise error(what, where=in_line(where, line) if line else where, todo=todo) from cause
    except _RepeatedKeyError as cause:
        line = repeated_key_line(text)
        place = in_line(where, line) if line else where
        raise error(f"this is no JSON: {cause}", where=place, todo=todo) from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"this is no JSON: {cause}", where=where, todo=todo) from cause


class _NoNumberError(ValueError):
    """A word that Python accepts as a JSON number, such as `NaN`, but JSON does not."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


class _RepeatedKeyError(ValueError):
    """A key that occurs twice in one object."""


def _refuse(word: str) -> None:
    raise _NoNumberError(word)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedKeyError(f"the key {shown(key)} occurs twice in one object")
        found[key] = value
    return found


def _pretty(value: Any, indent: str = "") -> str:
    """Return JSON with one line for each value that holds no objects and no long lists."""
    line = json.dumps(value, allow_nan=False)
    if len(indent) + len(line) <= _WIDTH or not _has_parts(value):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_pretty(part, deeper)}" for key, part in value.items()]
        return "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + json.dumps(part) for part in value) + f"\n{indent}]"


def _has_parts(value: Any) -> bool:
    """Whether a value never fits on one line."""
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, list) and any(isinstance(part, dict | list) for part in value)
