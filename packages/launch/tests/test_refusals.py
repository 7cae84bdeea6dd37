"""What a user is told when a default option is not there."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_core.plugins import PluginSource, discover
from sbp_launch.settings.catalog import make_catalog
from sbp_launch.settings.check import check
from sbp_launch.settings.compose import compose
from sbp_launch.settings.config import Application, key_of
from sbp_launch.settings.option_names import HOMES, OTHER_OPTIONS, nearest_option
from sbp_launch.settings.quoted_names import with_plain_names
from sbp_launch.settings.refusals import unknown_flag, unreadable

LAUNCH_ONLY = discover(
    [PluginSource(name="launch", value="sbp_launch.plugin", distribution="sbp-launch")]
)

CATALOG = make_catalog(LAUNCH_ONLY)
APP = Application(name="x", about="", config_name="config", check=check, task=print)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("trainer.steps=5", "trainer.steps"),
        ("+trainer.steps=5", "trainer.steps"),
        ("++a.b=c=d", "a.b"),
        ("~logger", "logger"),
        ("planner@other=x", "planner"),
    ],
)
def test_the_key_of_an_override_is_what_stands_before_the_equals_sign(
    override: str, key: str
) -> None:
    assert key_of(override) == key


def test_a_default_that_is_not_installed_says_what_to_install() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(CATALOG, APP, [])

    # Hydra finds several missing, and names one of them.
    choice = caught.value.what.partition(":")[0]
    group = choice.partition("=")[0]
    assert caught.value.where == ("sbp_launch/conf/config.yaml",)
    packages = " ".join(HOMES[group])
    assert caught.value.todo.startswith(f"pip install {packages}, which provide")
    all_of_them = 'or all that sbp-train uses: pip install "sbp-launch[all]"'
    assert caught.value.todo.endswith(f"options of the group {group!r}; {all_of_them}")
    assert isinstance(caught.value.__cause__, MissingConfigException)


def test_the_home_of_every_plugin_of_the_house_that_is_installed_is_known() -> None:
    registry = discover()
    near = ("sbp-torch", "sbp-launch")

    homeless = [
        (group, name, distribution)
        for group in HOMES
        for name in registry.names(group)
        if (distribution := registry.entry(group, name).distribution).startswith("sbp-")
        and distribution not in (*near, *HOMES[group])
        and "example" not in distribution
    ]

    assert homeless == []


@pytest.mark.parametrize(
    ("typed", "pins"),
    [
        ("+planner.pins={batch: {data: S(0)}}", {"batch": {"data": "S(0)"}}),
        ("+planner.pins={batch: S(0), B, head: B}", {"batch": "S(0), B", "head": "B"}),
        ("+planner.pins={use:batch: S(0)}", {"use:batch": "S(0)"}),
        ("+planner.pins.batch=B, S(0)", {"batch": "B, S(0)"}),
        ("+planner.pins.use:batch=S(0)", {"use:batch": "S(0)"}),
        ('+planner.pins.use:batch="S(0)"', {"use:batch": "S(0)"}),
        ("+planner.pins.use\\:batch={data: B}", {"use:batch": {"data": "B"}}),
        ("+planner.pins.'use:batch'=B", {"use:batch": "B"}),
        ("+planner.pins[use:batch]=B", {"use:batch": "B"}),
        ("+planner.pins.blocks.*.up=B", {"blocks.*.up": "B"}),
    ],
)
def test_a_pin_that_cannot_be_read_is_answered_with_one_that_the_shell_and_hydra_read(
    typed: str, pins: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(typed)

    (hint,) = shlex.split(caught.value.todo.partition(": ")[2])
    assert parsed(hint) == pins


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ('+planner.pins={"use:batch": "S(0)"}', {"use:batch": "S(0)"}),
        ("+planner.pins={'use:*.[qk].weight' : B}", {"use:*.[qk].weight": "B"}),
        ('+planner.pins={use:batch: {data: "S(0)"}}', {"use:batch": {"data": "S(0)"}}),
        ("+planner.pins={use:batch:B, use:x: B}", {"use:batch": "B", "use:x": "B"}),
        ('groups={"*.bias": {decay: 0.5}}', {"*.bias": {"decay": 0.5}}),
        ("a={use:x, b: c}", {"use": "x", "b": "c"}),
        ("a={b: 'x, \"c\": d'}", {"b": 'x, "c": d'}),
        ("a=\"{'q': 1}\"", "{'q': 1}"),
    ],
)
def test_a_name_may_have_quotes_or_begin_with_use_and_a_quoted_value_stays(
    typed: str, value: object
) -> None:
    assert parsed(typed) == value


@given(
    name=st.text("abz019_.*?[]:=,(){} -/@", min_size=1),
    value=st.text("ab \"':,{}", min_size=1),
    quote=st.sampled_from("\"'"),
)
def test_any_quoted_name_is_read_as_it_is_or_refused(name: str, value: str, quote: str) -> None:
    written = json.dumps(value) if not value.endswith("\\") else '""'
    typed = f"a={{b: {written}, {quote}{name}{quote}: {written}}}"

    try:
        found = parsed(typed)
    except ConfigError:
        # Hydra has no way to write these names.
        assert name != name.strip() or re.fullmatch(r"[+-]?[\d._e+-]*", name)
    else:
        assert found == {"b": json.loads(written), name: json.loads(written)}


def parsed(override: str) -> object:
    """Return the value that Hydra reads in an override of the command line."""
    try:
        (read,) = OverridesParser.create().parse_overrides([with_plain_names(override)])
    except OverrideParseException as error:
        raise unreadable(error) from error
    return read.value()


def test_an_unreadable_override_is_answered_without_repeating_it() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(CATALOG, APP, ["trainer.steps=[1"])

    assert caught.value.what == "the override 'trainer.steps=[1' cannot be read"
    assert "parsing" not in caught.value.todo


def test_an_option_is_described_by_the_comment_that_its_file_begins_with() -> None:
    headline = CATALOG.summary("optimizer", "adamw")

    assert headline == "Adam with decoupled weight decay"


PLANNERS = ["propagate", "manual/data_parallel", "manual/tensor_parallel", "manual/zero", "osdp"]


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("tensor_parallel", "manual/tensor_parallel"),
        ("tensorparallel", "manual/tensor_parallel"),
        ("manual/tensor_paralel", "manual/tensor_parallel"),
        ("zero", "manual/zero"),
        ("zero3", "manual/zero"),
        ("FSDP", "manual/zero"),
        ("OSDP", "osdp"),
        ("ddp", "manual/data_parallel"),
        ("manual/osdp", "osdp"),
        ("mine", ""),
    ],
)
def test_an_option_is_found_by_its_own_name_and_by_that_of_others(option: str, meant: str) -> None:
    assert nearest_option("planner", option, PLANNERS) == meant


def test_what_others_call_our_options_leads_to_options_that_exist() -> None:
    for package in ("sbp_boxing_torch", "sbp_models", "sbp_planner"):
        pytest.importorskip(package)  # which have these options
    catalog = make_catalog(discover())
    names = {
        group: [one.rpartition("/")[2] for one in catalog.options(group)]
        for group in catalog.groups()
    }

    lost = [
        asked for asked, name in OTHER_OPTIONS.items() if name not in names[asked.partition("=")[0]]
    ]

    assert lost == []


@pytest.mark.parametrize(
    ("override", "what", "todo"),
    [
        ("planner", "'planner' sets nothing", "choose an option: planner=OPTION"),
        ("trainer.steps", "'trainer.steps' sets nothing", "see --help"),
        ("5", "'5' sets nothing", "see --help"),
        ("cluster.mesh=(2,2)", "cannot be read", "square brackets: 'cluster.mesh=[2,2]'"),
        ("data.path=~/x", "cannot be read", "data.path=$HOME/x"),
        (
            "data.path=~you/x",
            "cannot be read",
            "does not replace ~ here: write the whole path",
        ),
        ("data.path=a;b", "cannot be read", """'data.path="a;b"'"""),
        ("trainer.steps=1,2", "several values: 1,2", "'trainer.steps=[1,2]'"),
    ],
)
def test_an_override_that_cannot_be_read_is_answered_with_how_to_write_it(
    override: str, what: str, todo: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(CATALOG, APP, [override])

    assert what in caught.value.what
    assert todo in caught.value.todo


@pytest.mark.parametrize(
    ("flag", "todo"),
    [
        ("--hepl", "did you mean --help?"),
        ("--trainer.steps=5", "settings have no dashes: trainer.steps=5"),
        ("-zzz", "see --help"),
    ],
)
def test_an_unknown_flag_is_answered_with_what_was_meant(flag: str, todo: str) -> None:
    error = unknown_flag(flag, get_args_parser())

    assert error.what == f"no flag is called {flag}"
    assert error.todo == todo
