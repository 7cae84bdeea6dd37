"""What option files say of their settings, and which files are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_launch.hydra_config import compose
from sbp_launch.parallel.choices import Choices
from sbp_launch.settings.catalog import comments, headline, refuse_expansion, refuse_faults

TEXT = """\
# What it is. More of it,
# in two lines.
name: x
a: 1  # one
b: "# no comment"
c:  # a mapping
  d: [1, 2]  # a list
  # above
  e: null
f: 2  # long
  # and longer
g: {h: 3}  # a flow
"""

WORDS = st.text("abc xyz.,", min_size=1).map(str.strip).filter(bool)
NAMES = st.lists(st.text("klm", min_size=1, max_size=4), min_size=1, max_size=5, unique=True)


def test_comments_stand_behind_a_setting_or_above_it() -> None:
    assert comments(TEXT) == {
        "a": "one",
        "c": "a mapping",
        "c.d": "a list",
        "c.e": "above",
        "f": "long and longer",
        "g": "a flow",
    }


def test_the_first_comment_is_of_the_file() -> None:
    assert headline(TEXT) == "What it is"
    assert headline("a: 1  # one\n") == ""


@pytest.mark.slow
@given(NAMES, st.data())
def test_every_comment_that_is_written_is_read(names: list[str], data: st.DataObject) -> None:
    told = {name: data.draw(WORDS) for name in names}
    values = ["1", "x y", "[1, '#']", "null", "'#'", "{m: 1}", ""]
    lines = [f"{name}: {data.draw(st.sampled_from(values))}  # {told[name]}\n" for name in names]

    found = comments("# of the file\n" + "".join(lines))

    assert found == told


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: 1\nb: [2\nc: 3\n", "line 3", "expected ',' or ']'"),
        ("a:\n\tb: 1\n", "line 2", "a tab where YAML takes spaces only"),
        ("a: 1\nb: 2\na: 3\n", "line 3", "'a' occurs twice, the first time in line 1"),
        ("- a\n- b\n", "line 1", "is a list, not a mapping"),
        ("just text\n", "line 1", "is a str, not a mapping"),
    ],
)
def test_a_file_that_is_no_option_is_refused_with_its_line(text: str, line: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_faults(text, "own/planner/x.yaml")

    assert what in caught.value.what
    assert caught.value.where[0].startswith(f"own/planner/x.yaml, {line}")


def test_good_files_pass() -> None:
    refuse_faults(TEXT, "x.yaml")
    refuse_faults("# nothing but a comment\n", "x.yaml")


def _references(levels: int) -> str:
    """Return a file of few lines that stands for 9 to the power of so many values."""
    lines = ["name: toy", "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for level in range(1, levels):
        many = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} [{many}]")
    return "\n".join(lines)


@pytest.mark.parametrize("text", [_references(30), "name: toy\na: &a [*a]", "a: &a {b: *a}"])
def test_references_do_not_stand_for_values_without_end(text: str) -> None:
    for check in (refuse_expansion, refuse_faults):
        with pytest.raises(ConfigError, match="expand to a value of extreme size") as refused:
            check(text, "toy.yaml")
        assert refused.value.where == ("toy.yaml",)
    assert comments(text) == {}


def test_a_few_references_are_taken() -> None:
    refuse_faults(_references(2), "toy.yaml")
    refuse_expansion("a: &a 1\nb: *a\nc: '*'", "toy.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a: 2001-99-99", "? [a]\n: b", "[" * 3000, "a: !!int x"])
def test_what_python_cannot_make_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the option file is"):
        refuse_faults(text, "toy.yaml")


@pytest.mark.parametrize("name", ["oss", "sdp", "fsdp", "pipe", "hsdp"])
def test_names_of_other_systems_have_the_same_settings_on_a_command_line_and_in_a_program(
    name: str,
) -> None:
    pytest.importorskip("sbp_planner")  # which has these options
    axes = {"pipe": "pipe", "hsdp": "shard"}.get(name, "data")
    composed = compose([f"planner=manual/{name}", "cluster.mesh=[2]", f"cluster.axes=[{axes}]"])

    option = Choices().option("planner", f"manual/{name}")

    assert {"name": option.name, **option.settings} == composed.planner
    assert option.name == "manual" and option.settings["pins"]
    assert option.settings["pipeline"] == ("gpipe" if name == "pipe" else "1f1b")
