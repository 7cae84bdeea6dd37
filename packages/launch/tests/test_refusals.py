"""What a user is told when a default option is not there."""

from __future__ import annotations

import importlib.metadata

import pytest
from hydra.errors import MissingConfigException

from sbp_core.errors import ConfigError
from sbp_core.plugins import PluginSource, discover
from sbp_launch.compose import compose, session
from sbp_launch.refusals import HOMES, key_of

LAUNCH_ONLY = discover(
    [PluginSource(name="launch", value="sbp_launch.plugin", distribution="sbp-launch")]
)


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


def test_a_default_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)

    with session(LAUNCH_ONLY) as catalog, pytest.raises(ConfigError) as caught:
        compose(catalog, LAUNCH_ONLY, "config", [])

    # Hydra finds several missing, and names one of them.
    choice = caught.value.what.partition(":")[0]
    home = HOMES[choice.replace("=", "/")]
    assert caught.value.where == ("sbp_launch/conf/config.yaml",)
    assert caught.value.todo == f"pip install {home}, which brings {choice}"
    assert isinstance(caught.value.__cause__, MissingConfigException)


def test_every_default_that_another_package_brings_has_a_home() -> None:
    own = ("cluster/", "optimizer/", "trainer/", "logger/")
    core = ("boxing/local",)
    defaults = [
        "model/gpt",
        "data/stdlib",
        "cluster/local",
        "boxing/local",
        "runtime/actor",
        "planner/manual/data_tensor",
        "optimizer/adamw",
        "trainer/default",
        "logger/jsonl",
    ]

    homeless = [
        option
        for option in defaults
        if option not in HOMES and not option.startswith(own) and option not in core
    ]

    assert homeless == []


@pytest.mark.parametrize("value", ["S(0)", "{batch: {data: S(0)}}"])
def test_an_sbp_outside_quotes_is_answered_with_the_quotes_that_it_needs(value: str) -> None:
    with session(LAUNCH_ONLY) as catalog, pytest.raises(ConfigError) as caught:
        compose(catalog, LAUNCH_ONLY, "config", [f"+planner.pins={value}"])

    assert caught.value.todo == 'quote values with brackets: "S(0)"'


def test_an_unreadable_override_is_answered_without_repeating_it() -> None:
    with session(LAUNCH_ONLY) as catalog, pytest.raises(ConfigError) as caught:
        compose(catalog, LAUNCH_ONLY, "config", ["trainer.steps=[1"])

    assert caught.value.what == "the override 'trainer.steps=[1' cannot be read"
    assert "parsing" not in caught.value.todo


def test_an_option_is_described_by_the_comment_that_its_file_begins_with() -> None:
    with session(LAUNCH_ONLY) as catalog:
        headline = catalog.headline("optimizer/adamw")

    assert headline == "Adam with decoupled weight decay"
