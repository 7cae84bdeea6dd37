"""Values as JSON and back: every type that values of ours have, and all that may be wrong."""

from __future__ import annotations

import doctest
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core import serialize
from sbp_core.errors import ConfigError, SbpError, SbpValueError
from sbp_core.sbp import B, NdSbp, S
from sbp_core.serialize import Document, JsonForm, Keys, dump, load, parse
from sbp_core.serialize.lines import Lines, json_parts, repeated_key_line


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True, slots=True)
class Circle:
    radius: float

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise SbpValueError(f"a radius of {self.radius}", accepted="at least 0", todo="turn it")


@dataclass(frozen=True, slots=True)
class Square:
    side: float
    colour: Colour = Colour.RED


#: A number that files have as text.
Roman = Annotated[Any, JsonForm(str, lambda value: "I" * value, len)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    name: str
    count: int = 0
    is_wet: bool = False
    shapes: tuple[Circle | Square, ...] = ()
    size: tuple[int, float] = (1, 1.0)
    by_name: Mapping[str, Circle] = field(default_factory=dict)
    by_corner: Mapping[tuple[int, int], Colour] = field(default_factory=dict)
    frame: Square | None = None
    how: float | str | None = None
    sbp: NdSbp | None = None
    year: Roman = 0
    report: Any = None
    area: float = field(init=False, default=0.0)


floats = st.floats(min_value=0, allow_nan=False)
circles = st.builds(Circle, floats)
squares = st.builds(Square, floats, st.sampled_from(Colour))
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=10,
)
pictures = st.builds(
    Picture,
    name=st.text(),
    count=st.integers(-(2**63), 2**64 - 1),
    is_wet=st.booleans(),
    shapes=st.lists(circles | squares, max_size=3).map(tuple),
    size=st.tuples(st.integers(0, 9), floats),
    by_name=st.dictionaries(st.text(), circles, max_size=3),
    by_corner=st.dictionaries(
        st.tuples(st.integers(0, 9), st.integers(0, 9)), st.sampled_from(Colour), max_size=3
    ),
    frame=st.none() | squares,
    how=st.none() | floats | st.text(),
    sbp=st.sampled_from([None, NdSbp(S(0), B), NdSbp()]),
    year=st.integers(0, 9),
    report=anything,
)


@given(pictures)
def test_every_value_comes_back_equal(picture: Picture) -> None:
    text = json.dumps(dump(picture, Picture), allow_nan=False)

    found = load(parse(text), Picture)

    assert found == picture
    assert json.dumps(dump(found, Picture)) == text


def test_what_has_its_default_is_left_out() -> None:
    assert dump(Picture(name="a", shapes=(Square(1),)), Picture) == {
        "name": "a",
        "shapes": [{"type": "Square", "side": 1.0}],
    }


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_has_not_come_back(number: float) -> None:
    text = json.dumps(dump((number, [number]), tuple[float, Any]), allow_nan=False)

    one, (other,) = load(parse(text), tuple[float, Any])

    assert repr(one) == repr(other) == repr(number)


def test_an_integer_is_read_as_a_number_where_one_is_expected() -> None:
    (found,) = load([1], tuple[float])

    assert type(found) is float


def deep(depth: int, *, maps: bool = False) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value} if maps else [value]
    return value


@pytest.mark.parametrize(
    ("change", "says", "accepted"),
    [
        ({"name": None}, "name is null", "text"),
        ({"name": 3}, "name is 3", "text"),
        ({"name": "\ud800"}, r"name is '\\ud800'", "text of whole characters"),
        ({"name": "x" * 500, "count": "y" * 500}, r"count is 'y{50,70}\.\.\.", "an integer"),
        ({3: "a"}, "it has no place for 3", "name, count"),
        ({"area": 3}, "it has no place for 'area'", "name, count"),
        ({"count": True}, "count is true", "an integer"),
        ({"count": 1.0}, "count is 1.0", "an integer"),
        ({"count": 2**64}, "count is an integer of 65 bits", "an integer of 64 bits"),
        ({"count": -(2**63) - 1}, "count is -9223372036854775809", "an integer of 64 bits"),
        ({"count": 10**5000}, "count is an integer of 16610 bits", "64 bits"),
        ({"is_wet": 1}, "is_wet is 1", "true or false"),
        ({"shapes": {}}, "shapes is a mapping of 0", "a list"),
        ({"shapes": "abc"}, "shapes is 'abc'", "a list"),
        ({"shapes": [{"radius": 1}]}, r"shapes\[0\]\.type is null", "Circle or Square"),
        ({"shapes": [{"type": ["Circle"]}]}, r"shapes\[0\]\.type is a list", "Circle or Square"),
        ({"shapes": [3]}, r"shapes\[0\] is 3", "a mapping with type: Circle or Square"),
        ({"shapes": [{"type": "Circle", "radius": "x"}]}, r"shapes\[0\]\.radius is 'x'", "number"),
        ({"shapes": [{"type": "Circle", "radius": -1}]}, r"shapes\[0\]: a radius of -1", "least 0"),
        ({"size": [1]}, "size is a list of 1", "a list of 2: an integer, a number"),
        ({"size": [1, None]}, r"size\[1\] is null", "a number"),
        ({"size": [1, math.inf]}, r"size\[1\] is inf", "a number"),
        ({"size": [1, math.nan]}, r"size\[1\] is nan", "a number"),
        ({"size": [1, 10**400]}, r"size\[1\] is an integer of 1329 bits", "of 64 bits"),
        ({"size": [1, {"float": "big"}]}, r"size\[1\] is a mapping", "a number"),
        ({"by_name": []}, "by_name is a list of 0", "a mapping"),
        ({"by_name": {"a.b": 3}}, r"by_name\['a\.b'\] is 3", "a mapping with radius"),
        ({"by_name": {3: {"radius": 1}}}, r"by_name\['3'\] is 3", "text"),
        ({"by_corner": {}}, "by_corner is a mapping of 0", "a list"),
        ({"by_corner": [[[1, 2], "red"], [[1, 2], "red"]]}, "by_corner has a key twice", "once"),
        ({"by_corner": [[[1, 2], "rod"]]}, r"by_corner\[0\]\[1\] is 'rod'", "red, green"),
        ({"by_corner": [[[1, 2], ["red"]]]}, r"by_corner\[0\]\[1\] is a list", "red, green"),
        ({"frame": 3}, "frame is 3", "null or a mapping|a mapping with side or null"),
        ({"how": []}, "how is a list of 0", "a number or text or null"),
        ({"how": True}, "how is true", "a number or text or null"),
        ({"sbp": "Q"}, "sbp: 'Q' is no SBP value", r"S\(dim\)"),
        ({"sbp": 3}, "sbp is 3", "text or null"),
        ({"report": {1: 2}}, r"report\['1'\] is 1", "text"),
        ({"report": {"a": {1, 2}}}, r"report\.a is a set", "a list or a mapping"),
        ({"report": {"a": "\udfff"}}, r"report\.a is '\\udfff'", "whole characters"),
        ({"report": deep(60, maps=True)}, r"report(\.a){51} is too deep", "50 lists"),
        ({"report": deep(60)}, r"report(\[0\]){51} is too deep", "50 lists"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(
    change: Mapping[Any, Any], says: str, accepted: str
) -> None:
    with pytest.raises(SbpValueError, match=f"^{says}") as caught:
        load({"name": "a", **change}, Picture, where="a.json")

    assert caught.value.where == ("a.json",)
    assert re.search(accepted, caught.value.accepted)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "it is a list of 0"),
        (None, "it is null"),
        ({"count": 3}, "it has no 'name'"),
        ({"nam": "a"}, "it has no place for 'nam'"),
    ],
)
def test_what_does_not_fit_as_a_whole_is_refused(value: object, says: str) -> None:
    with pytest.raises(SbpValueError, match=f"^{says}") as caught:
        load(value, Picture)

    assert "name" in caught.value.accepted


def test_what_to_do_is_the_nearest_name_what_a_class_says_or_what_the_caller_says() -> None:
    with pytest.raises(SbpValueError) as misspelt:
        load({"nmae": "a"}, Picture, todo="write it again")
    with pytest.raises(SbpValueError) as refused:
        load({"radius": -1}, Circle, todo="write it again")
    with pytest.raises(SbpValueError) as other:
        load({"radius": None}, Circle, todo="write it again")

    todo = [caught.value.todo for caught in (misspelt, refused, other)]
    assert todo == ["did you mean 'name'?", "turn it", "write it again"]


def test_a_field_that_would_hide_the_class_is_a_mistake_of_ours() -> None:
    @dataclass(frozen=True)
    class Typed:
        type: str

    with pytest.raises(AssertionError, match="tells classes apart"):
        dump(Typed(type="a"), Typed)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "this is no JSON"),
        ("", "this is no JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("[NaN]", "NaN is no number of JSON"),
        ("[-Infinity]", "-Infinity is no number of JSON"),
        ("1" * 5000, "this is no JSON"),
        ("[" * 100_000, "this is no JSON"),
        ('{"a":' * 100_000, "this is no JSON"),
    ],
)
def test_what_is_no_json_is_refused(text: str, says: str) -> None:
    with pytest.raises(SbpValueError, match=says):
        parse(text, where="a.json")


PICTURE = Document(
    kind=Picture, format="sbp-picture", version=3, todo="paint it again", error=ConfigError
)


def test_a_file_comes_back_equal_with_a_line_a_part(tmp_path: Path) -> None:
    path = tmp_path / "picture.json"
    shapes = tuple(Square(side) for side in range(9))
    picture = Picture(name="ä", shapes=shapes, how=math.inf)

    PICTURE.write(picture, path)

    assert PICTURE.read(path) == picture
    lines = path.read_text("utf-8").splitlines()
    assert lines[1:3] == ['  "format": "sbp-picture",', '  "version": 3,']
    assert sum("Square" in line for line in lines) == 9


@pytest.mark.parametrize(
    ("value", "says", "accepted"),
    [
        (None, "it is null", "a JSON object"),
        ([1], "it is a list of 1", "a JSON object"),
        ({}, "its format is null", '"format": "sbp-picture"'),
        ({"format": "sbp-plan", "version": 3}, "'sbp-plan'", '"format": "sbp-picture"'),
        ({"format": ["sbp-picture"]}, "a list of 1", '"format": "sbp-picture"'),
        ({"format": "sbp-picture", "version": 2}, "its version is 2", '"version": 3'),
        ({"format": "sbp-picture", "version": "3"}, "its version is '3'", '"version": 3'),
        ({"format": "sbp-picture", "version": 3.0}, "its version is 3.0", '"version": 3'),
        ({"format": "sbp-picture", "version": 3}, "the picture file has no 'name'", "name"),
    ],
)
def test_another_file_is_refused(value: object, says: str, accepted: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        PICTURE.load(value, "a.json")

    assert caught.value.where == ("a.json",)
    assert accepted in caught.value.accepted
    assert caught.value.todo == "paint it again"


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (None, ""),
        (b"", ""),
        (b" \n", ""),
        (b"{\n\xff\xfe}", ", line 2"),
        (b"{", ", line 1, column 2"),
        (b"\0", ", line 1, column 1"),
        (b'{"a": 1,\n"b": [1,\n2', ", line 3, column 2"),
        (b'{"b": {"c": 1,\n\n"\\u0063": 1}}', ", line 3"),
        (b'{"b":\n [1, "NaN",\nNaN]}', ", line 3"),
        (b'{"format": "sbp-picture",\n\n"version": 7}', ", line 3"),
        (b'{"format": "sbp-picture", "version": 3,\n"shapes": 1,\n"shpes": 7}', ", line 2"),
        (b'{"format": "sbp-picture", "version": 3,\n"shapes": [],\n"shpes": 7}', ", line 3"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(
    tmp_path: Path, content: bytes | None, place: str
) -> None:
    path = tmp_path / "picture.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        PICTURE.read(path)

    assert caught.value.where == (str(path) + place,)


def json_text(value: Any, random: Random) -> tuple[str, dict[Keys, int]]:
    """Return a value as JSON with line breaks anywhere, and the line of each part."""
    lines: dict[Keys, int] = {}
    text = random.choice(["", "\n"])

    def write(part: Any, keys: Keys) -> None:
        nonlocal text
        lines.setdefault(keys, text.count("\n") + 1)
        if isinstance(part, dict | list):
            text += "{["[isinstance(part, list)]
            entries = part.items() if isinstance(part, dict) else enumerate(part)
            for index, (key, entry) in enumerate(entries):
                text += ("," if index else "") + random.choice(["", "\n", " \n\n"])
                lines[(*keys, key)] = text.count("\n") + 1
                if isinstance(part, dict):
                    text += json.dumps(key) + random.choice([":", " :\n", ": "])
                write(entry, (*keys, key))
            text += random.choice(["", "\n"]) + "}]"[isinstance(part, list)]
        else:
            text += json.dumps(part)

    write(value, ())
    return text, {**lines, (): 1}


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda part: st.lists(part) | st.dictionaries(st.text(), part),
    ),
    st.randoms(use_true_random=False),
)
def test_the_line_of_every_part_of_a_json_text_is_known(value: Any, random: Random) -> None:
    text, lines = json_text(value, random)

    assert json.loads(text) == value
    assert Lines("", lambda: json_parts(text)).index == lines
    assert repeated_key_line(text) is None


def test_a_folder_and_a_name_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a\0b"):
        with pytest.raises(SbpError, match="cannot be read"):
            PICTURE.read(path)


def test_the_examples_in_the_docstring_hold() -> None:
    failed, attempted = doctest.testmod(serialize)

    assert (failed, attempted) == (0, 4)
