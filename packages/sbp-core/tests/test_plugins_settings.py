"""Settings into config dataclasses: what is taken, what is refused, and how that is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_core.plugins import merge_settings


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    count: int = 1
    rate: float = 0.5
    on: bool = False
    text: str = "a"
    maybe: int | None = None
    either: int | str = 0
    kind: Literal["fast", "slow", 3] = "fast"
    colour: Colour = Colour.RED
    pair: tuple[float, int] = (0.5, 1)
    many: tuple[int, ...] = ()
    items: list[str] = field(default_factory=list)
    run: Sequence[int] = ()
    table: Mapping[str, float] = field(default_factory=dict)
    rows: tuple[tuple[int, ...], ...] = ()
    inner: Inner = Inner()
    inners: tuple[Inner, ...] = ()
    path: Path = Path()
    anything: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needy:
    size: int

    def __post_init__(self) -> None:
        if self.size > 9:
            raise ValueError(f"size={self.size} is too large")
        if self.size < 0:
            raise ConfigError("negative is not meant", accepted="0 .. 9", where="rank 3")


@pytest.mark.parametrize(
    ("name", "given_value", "wanted"),
    [
        ("count", 3, 3),
        ("rate", 3, 3.0),
        ("rate", 1e-3, 1e-3),
        ("on", True, True),
        ("maybe", None, None),
        ("maybe", 3, 3),
        ("either", 3, 3),
        ("either", "x", "x"),
        ("kind", "slow", "slow"),
        ("kind", 3, 3),
        ("colour", "blue", Colour.BLUE),
        ("colour", "BLUE", Colour.BLUE),
        ("colour", Colour.BLUE, Colour.BLUE),
        ("pair", [1, 2], (1.0, 2)),
        ("many", [1, 2, 3], (1, 2, 3)),
        ("items", ("a", "b"), ["a", "b"]),
        ("run", [1, 2], (1, 2)),
        ("table", {"a": 1}, {"a": 1.0}),
        ("rows", [[1], [2, 3], []], ((1,), (2, 3), ())),
        ("inner", {"size": 5}, Inner(size=5)),
        ("inner", Inner(size=6), Inner(size=6)),
        ("inners", [{}, {"size": 5}], (Inner(), Inner(size=5))),
        ("path", "/a/b", Path("/a/b")),
        ("anything", {"x": [1]}, {"x": [1]}),
    ],
)
def test_a_value_of_the_annotated_type_is_taken(
    name: str, given_value: object, wanted: object
) -> None:
    value = getattr(merge_settings(Config, {name: given_value}), name)

    assert value == wanted
    assert type(value) is type(wanted)


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("count", "3", "c.count"),
        ("count", 3.5, "c.count"),
        ("count", True, "c.count"),
        ("count", None, "c.count"),
        ("rate", "fast", "c.rate"),
        ("rate", True, "c.rate"),
        ("on", 1, "c.on"),
        ("on", "true", "c.on"),
        ("text", 1, "c.text"),
        ("maybe", "3", "c.maybe"),
        ("either", [1], "c.either"),
        ("kind", "fsat", "c.kind"),
        ("kind", 4, "c.kind"),
        ("colour", "green", "c.colour"),
        ("pair", [1.0], "c.pair"),
        ("pair", [1.0, "x"], r"c.pair\[1\]"),
        ("many", 3, "c.many"),
        ("many", "123", "c.many"),
        ("many", [1, "x"], r"c.many\[1\]"),
        ("table", [1], "c.table"),
        ("table", {"a": "x"}, "c.table.a"),
        ("rows", [[1], ["x"]], r"c.rows\[1\]\[0\]"),
        ("inner", 3, "c.inner"),
        ("inner", {"size": "x"}, "c.inner.size"),
        ("inner", {"sise": 3}, "c.inner.sise"),
        ("inners", [{}, {"size": "x"}], r"c.inners\[1\].size"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(name: str, value: object, key: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        merge_settings(Config, {name: value}, key="c", where="there.yaml")

    assert caught.value.where == ("there.yaml",)
    assert caught.value.accepted


def test_an_unknown_key_is_answered_with_the_nearest_and_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        merge_settings(Needy, {"sise": 1}, key="planner", where="there.yaml")

    assert caught.value.what == "no setting is called 'planner.sise'"
    assert caught.value.accepted == "size"
    assert caught.value.todo == "did you mean 'planner.size'?"


def test_a_setting_without_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"planner\.size is not set"):
        merge_settings(Needy, {}, key="planner")


def test_a_refusal_that_starts_with_a_field_gets_its_whole_key() -> None:
    with pytest.raises(ConfigError) as caught:
        merge_settings(Needy, {"size": 10}, key="planner", where="there.yaml")

    assert caught.value.what == "planner.size=10 is too large"
    assert caught.value.where == ("there.yaml",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    FORMER_NAMES: ClassVar[Mapping[str, str]] = {"tries": "pin_sets"}

    pin_sets: int = 0


def test_a_former_name_of_a_setting_is_taken_with_a_warning_that_names_the_new_one() -> None:
    with pytest.warns(FutureWarning, match=r"planner\.tries has a new name: planner\.pin_sets"):
        merged = merge_settings(Renamed, {"tries": 3, "pin_sets": 1}, key="planner")

    assert merged == Renamed(pin_sets=3)


def test_a_refusal_of_the_whole_keeps_its_own_advice() -> None:
    with pytest.raises(ConfigError) as caught:
        merge_settings(Needy, {"size": -1}, key="planner", where="there.yaml")

    assert caught.value.what == "planner: negative is not meant"
    assert caught.value.where == ("there.yaml", "rank 3")
    assert caught.value.accepted == "0 .. 9"


VALUES = {
    "count": st.integers(),
    "rate": st.floats(allow_nan=False),
    "on": st.booleans(),
    "text": st.text(),
    "maybe": st.none() | st.integers(),
    "either": st.integers() | st.text(),
    "kind": st.sampled_from(["fast", "slow", 3]),
    "many": st.lists(st.integers(), max_size=3).map(tuple),
    "table": st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3),
    "inner": st.builds(Inner, size=st.integers()),
}


@settings(derandomize=True, max_examples=100)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_every_config_is_rebuilt_from_its_own_plain_values(chosen: dict[str, object]) -> None:
    config = Config(**chosen)  # type: ignore[arg-type]  # drawn by field

    assert merge_settings(Config, asdict(config)) == config


@settings(derandomize=True, max_examples=100)
@given(st.text(max_size=8).filter(lambda name: name != "size"))
def test_no_name_but_a_field_is_ever_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="no setting is called"):
        merge_settings(Inner, {"size": 1, name: 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    count: int = 1
    memory_bytes: int = 1
    budget_bytes: float | None = None


@given(st.integers(-(10**15), 10**15))
def test_a_whole_number_is_an_integer_however_it_is_written(number):
    assert merge_settings(Sizes, {"count": float(number)}) == Sizes(count=number)


@given(st.floats())
def test_a_float_that_is_no_whole_number_is_no_integer(number):
    if not number.is_integer():
        with pytest.raises(ConfigError, match=r"count is .* \(float\)"):
            merge_settings(Sizes, {"count": number})


@pytest.mark.parametrize(
    ("text", "size"),
    [("90MB", 90_000_000), ("4GiB", 4 * 2**30), ("1.5 kB", 1500), ("7 B", 7), ("2TiB", 2 * 2**40)],
)
def test_sizes_may_have_units(text, size):
    found = merge_settings(Sizes, {"memory_bytes": text, "budget_bytes": text})

    assert found == Sizes(memory_bytes=size, budget_bytes=size)
    with pytest.raises(ConfigError, match="count is"):
        merge_settings(Sizes, {"count": text})


@pytest.mark.parametrize("text", ["90", "90 MBit", "iB", "-1MB", "MB", "1e3MB", "", 1.5])
def test_other_texts_are_no_sizes_and_the_refusal_shows_one(text):
    with pytest.raises(ConfigError, match="memory_bytes is") as refused:
        merge_settings(Sizes, {"memory_bytes": text})

    assert refused.value.accepted == "an integer, or text with a unit, such as 90MB or 4GiB"
