"""Random edits of JSON values, texts and bytes, to test readers of files with damaged input.

The edits imitate mistakes of people, scripts and disks. For any such input, a reader must return a
value or raise an `SbpError`, within a short time. `fuzz` uses this module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

__all__ = ["ODD_VALUES", "edited", "edited_bytes", "edited_text"]

#: Values of every kind in JSON or YAML, including awkward ones. NaN is left out: it is not JSON,
#: and files are compared.
ODD_VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1000, 2**31, 2**63 - 1, -(2**63), 2**64, 10**30,
    0.0, 0.5, -0.5, 1e-320, 1e308, -1e308, float("inf"),
    "", " ", "x", "B", "S(0)", "S(7)", "S(99999999999999999999)", "P(max)", "(B)", "(", "@", "0",
    "-1", "1e3", "null", "cpu", "float32", "*", "a.b", "\0", "\n", "\ud800", "ä", "x" * 10_000,
    (), ((),), (0,), (1, 2, 3), ("x",), (None,), {}, {"": 0}, {"ref": "x"}, {"float": "inf"},
    {"type": "TensorType"}, {"x": {"x": {}}},
)  # fmt: skip

#: Snippets to insert into a text.
_SNIPPETS = (
    " ", "  ", "\n", "\t", "\0", ":", ": ", "- ", ",", "[", "]", "{", "}", "(", ")", "'", '"', "#",
    "&a ", "*a", "!", "!!python/name:os.system ", "|", ">", "%", "@", "@1", "@-1", "`", "\\",
    "<<: ", "---\n", "...\n", "0", "-1", "9" * 30, "1e999", ".nan", ".inf", "null", "~",
    "2001-99-99", "S(1)", "B", "P", "->", "*", "?", "{0-99999999}", "{1-0}", "=", "ä", "\x85",
    "\ufeff", "[" * 2000, "{a: " * 2000, '{"a": ' * 2000, "NaN", "-Infinity", "\r", "\u2028", "../",
    "/etc/passwd", "${oc.env:HOME}", "!!binary ", "1:59:59", "0x", "&a [*a, *a]", "__class__",
)  # fmt: skip

#: Numbers and SBPs in a text, which edits replace by others that may be valid.
_WORD = re.compile(r"[SP]\(\w+\)|\b[BP]\b|\d+")
_WORDS = ("S(0)", "S(1)", "S(2)", "B", "P", "P(max)", "0", "1", "2", "3", "-1", "1000000000")


def edited(value: Any, random: Random) -> Any:
    """Return a JSON value with one random edit at a random place.

    Args:
        value: Not changed; the result shares its unchanged parts.
        random: Draws the place and the edit.
    """
    if not isinstance(value, dict | list) or not value or random.random() < 0.15:
        return _changed(value, random)
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    # Prefer containers, because most of a file is deeply nested.
    weights = [5 if isinstance(value[place], dict | list) else 1 for place in places]
    place = random.choices(places, weights)[0]
    copy = value.copy()
    copy[place] = edited(value[place], random)
    return copy


def _changed(value: Any, random: Random) -> Any:
    """Return a value that was edited itself."""
    if random.random() < 0.4:
        return _odd(random)
    if isinstance(value, dict) and value:
        return _changed_mapping(value, random)
    if isinstance(value, list) and value:
        return _changed_list(value, random)
    if isinstance(value, str):
        return edited_text(value, random)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return random.choice([[value], {"x": value}, str(value), _odd(random)])
    return random.choice([-value, value + 1, value - 1, value * 2, value * 10**9, str(value)])


def _changed_mapping(value: dict[str, Any], random: Random) -> Any:
    key = random.choice(list(value))
    rest = {name: part for name, part in value.items() if name != key}
    other = random.choice(list(value))
    choices: list[Any] = [
        rest,
        {**rest, edited_text(key, random): value[key]},
        {**value, f"{key}x": value[key]},
        {**value, key: value[other], other: value[key]},
        {**value, _text(random): _odd(random)},
        list(value.items()),
        list(value.values()),
        [value],
    ]
    return random.choice(choices)


def _changed_list(value: list[Any], random: Random) -> Any:
    index, other = random.randrange(len(value)), random.randrange(len(value))
    swapped = list(value)
    swapped[index], swapped[other] = value[other], value[index]
    return random.choice(
        [
            [*value[:index], *value[index + 1 :]],
            [*value[:index], value[index], *value[index:]],
            swapped,
            [*value, _odd(random)],
            value * 3,
            value[::-1],
            [value],
            {str(place): part for place, part in enumerate(value)},
        ]
    )


def _odd(random: Random) -> Any:
    value = random.choice(ODD_VALUES)
    return list(value) if isinstance(value, tuple) else value


def _text(random: Random) -> str:
    return random.choice([value for value in ODD_VALUES if isinstance(value, str)])


def edited_text(text: str, random: Random) -> str:
    """Return a text with one random edit: of a word, of characters, of a line, or of two."""
    start = random.randint(0, len(text))
    stop = min(len(text), start + random.choice([0, 1, 1, 1, 2, 5, 20]))
    lines = text.splitlines(keepends=True) or [""]
    line, other = random.randrange(len(lines)), random.randrange(len(lines))
    kind = random.randrange(10)
    words = list(_WORD.finditer(text))
    if kind >= 7 and words:
        word = random.choice(words)
        return text[: word.start()] + random.choice(_WORDS) + text[word.end() :]
    if kind == 0:
        return text[:start] + text[stop:]
    if kind == 1:
        return text[:start] + random.choice(_SNIPPETS) + text[stop:]
    if kind == 2:
        return text[:stop] + text[start:]
    if kind == 3:
        return "".join([*lines[:line], *lines[line + 1 :]])
    if kind == 4:
        return "".join([*lines[: line + 1], lines[other], *lines[line + 1 :]])
    if kind == 5:
        shift = random.choice([" ", "  ", "\t", "- "])
        return "".join([*lines[:line], shift + lines[line], *lines[line + 1 :]])
    lines[line], lines[other] = lines[other], lines[line]
    return "".join(lines)


#: Sizes of numbers in a binary file, in bytes.
_FIELDS = (1, 2, 4, 8)


def edited_bytes(data: bytes, random: Random) -> bytes:
    """Return bytes with one random edit, like damage by a disk, a cut transfer or a person."""
    size = len(data)
    start = random.randrange(size + 1)
    # Headers are at the start.
    start = min(start, random.choice([start, 8, 64, 512]))
    stop = min(size, start + random.choice([1, 1, 2, 8, 64, 4096]))
    kind = random.randrange(8)
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + data[stop:]
    if kind == 2:
        return data[:stop] + data[start:]
    if kind == 3:
        return data[:start] + bytes(stop - start) + data[stop:]
    if kind == 4:
        return data[:start] + random.randbytes(stop - start) + data[stop:]
    if kind == 5:
        width = random.choice(_FIELDS)
        most: int = 2 ** (8 * width)
        number = random.choice([0, 1, most // 2 - 1, most - 1, size % most])
        field: bytes = number.to_bytes(width, random.choice(["little", "big"]))
        return data[:start] + field + data[start + width :]
    if not size:
        return random.randbytes(8)
    place = min(start, size - 1)
    flipped = data[place] ^ (1 << random.randrange(8))
    return data[:place] + bytes([flipped]) + data[place + 1 :]
