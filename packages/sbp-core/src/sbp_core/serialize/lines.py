"""Line numbers of the parts of a JSON file, for error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

#: Keys and indices that lead to a part, the outermost first.
Keys = tuple[str | int, ...]

#: A part of a file: its keys, and its line.
Part = tuple[Sequence[str | int], int]

#: The tokens of JSON: strings, punctuation, other words.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


class Lines:
    """The line of each part of a file.

    Args:
        file: Its name; may be empty.
        parts: Yields the keys of every part with its line, counted from 1; called when a line is
            needed. It may change a yielded sequence of keys when it yields the next one.
    """

    def __init__(self, file: str, parts: Callable[[], Iterable[Part]]) -> None:
        self.file = file
        self._parts = parts

    @cached_property
    def index(self) -> Mapping[Keys, int]:
        """The line of every part."""
        return {tuple(keys): line for keys, line in self._parts()}

    def where(self, keys: Sequence[str | int]) -> str:
        r"""Return the file and the line of a part, or of the innermost existing part around it.

        The other parts are not stored, because there may be many.

        >>> Lines("a.json", lambda: json_parts('{"a":\n [7,\n  {"b": 1}]}')).where(["a", 1, "c"])
        'a.json, line 3'
        """
        wanted = list(keys)
        depth, line = -1, 0
        for found, at in self._parts():
            if depth < len(found) <= len(wanted) and list(found) == wanted[: len(found)]:
                depth, line = len(found), at
        return self.file if depth < 0 else in_line(self.file, line)


def in_line(file: str, line: int) -> str:
    """Return a place as text; the file may be empty."""
    return f"{file}, line {line}" if file else f"line {line}"


def repeated_key_line(text: str) -> int | None:
    """Return the line of the first repeated key in an object of a JSON text."""
    # One set for each open object: the sets of all objects would be as large as the file.
    names: list[set[str]] = []
    for keys, line in json_parts(text):
        del names[len(keys) :]
        names += [set() for _ in range(len(keys) - len(names))]
        if not keys or not isinstance(keys[-1], str):
            continue
        if keys[-1] in names[-1]:
            return line
        names[-1].add(keys[-1])
    return None


def word_line(text: str, word: str) -> int | None:
    """Return the first line of a JSON text that contains a word outside of strings."""
    starts = (token.start() for token in _TOKEN.finditer(text) if token[0] == word)
    return next((text.count("\n", 0, start) + 1 for start in starts), None)


def json_parts(text: str) -> Iterator[Part]:
    r"""Yield the keys and the line of each part, in the order of the text, JSON or nearly so.

    All keys are yielded in one list, which changes.

    >>> [(tuple(keys), line) for keys, line in json_parts('{"a":\n [7,\n  {"b": 1}]}')]
    [((), 1), (('a',), 1), (('a', 0), 2), (('a', 1), 3), (('a', 1, 'b'), 3)]
    """
    keys: list[str | int] = []  # one for each object and list that is open
    awaits_key = False
    line, counted = 1, 0
    yield keys, 1
    for token in _TOKEN.finditer(text):
        line += text.count("\n", counted, token.start())
        counted, word = token.start(), token[0]
        if word in ("}", "]"):
            if keys:
                keys.pop()
            awaits_key = False
        elif word == ",":
            if keys and isinstance(keys[-1], int):
                keys[-1] += 1
            else:
                awaits_key = bool(keys)
        elif word == ":":
            awaits_key = False
        elif awaits_key and word[0] == '"':
            keys[-1] = _key(word)
            yield keys, line
        else:
            if keys and isinstance(keys[-1], int):
                yield keys, line
            if word in ("{", "["):
                keys.append("" if word == "{" else 0)
                awaits_key = word == "{"


def _key(word: str) -> str:
    """Return the content of a JSON string, or the word itself if it is none."""
    try:
        return str(json.loads(word, strict=False))
    except ValueError:
        return word
