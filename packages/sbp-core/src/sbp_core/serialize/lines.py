"""In which line of a file each of its parts stands, so that messages can say it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

#: Keys and indices that lead to a part, the outermost first.
Keys = tuple[str | int, ...]

#: What JSON is made of: strings, punctuation, other words.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


class Lines:
    """The lines of a file.

    Args:
        file: Its name; may be empty.
        index: Returns the line of every part, counted from 1; called when a line is asked for.
    """

    def __init__(self, file: str, index: Callable[[], Mapping[Keys, int]]) -> None:
        self.file = file
        self._make_index = index

    @cached_property
    def index(self) -> Mapping[Keys, int]:
        """The line of every part."""
        return self._make_index()

    def where(self, keys: Sequence[str | int]) -> str:
        r"""Return the file and the line of a part, or of the innermost one around it that stands.

        >>> Lines("a.json", lambda: json_lines('{"a":\n [7,\n  {"b": 1}]}')).where(["a", 1, "c"])
        'a.json, line 3'
        """
        for stop in range(len(keys), -1, -1):
            if (line := self.index.get(tuple(keys[:stop]))) is not None:
                return in_line(self.file, line)
        return self.file


def in_line(file: str, line: int) -> str:
    """Return a place in words; the file may be empty."""
    return f"{file}, line {line}" if file else f"line {line}"


def json_lines(text: str) -> dict[Keys, int]:
    r"""Return the line of every part of a JSON text.

    >>> json_lines('{"a":\n [7,\n  {"b": 1}]}')
    {(): 1, ('a',): 1, ('a', 0): 2, ('a', 1): 3, ('a', 1, 'b'): 3}
    """
    return dict(_parts(text))


def repeated_key_line(text: str) -> int | None:
    """Return the line in which a key of a JSON text stands for the second time."""
    seen: set[Keys] = set()
    for keys, line in _parts(text):
        if keys in seen:
            return line
        seen.add(keys)
    return None


def word_line(text: str, word: str) -> int | None:
    """Return the line in which a word of a JSON text, outside of strings, stands first."""
    starts = (token.start() for token in _TOKEN.finditer(text) if token[0] == word)
    return next((text.count("\n", 0, start) + 1 for start in starts), None)


def _parts(text: str) -> Iterator[tuple[Keys, int]]:
    """Yield the keys and the line of each part, in the order of the text, JSON or nearly so."""
    keys: list[str | int] = []  # one for each object and list that is open
    awaits_key = False
    line, counted = 1, 0
    yield (), 1
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
            yield tuple(keys), line
        else:
            if keys and isinstance(keys[-1], int):
                yield tuple(keys), line
            if word in ("{", "["):
                keys.append("" if word == "{" else 0)
                awaits_key = word == "{"


def _key(word: str) -> str:
    """Return what a JSON string says, or itself if it is none."""
    try:
        return str(json.loads(word, strict=False))
    except ValueError:
        return word
