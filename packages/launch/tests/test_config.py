"""The values of a run's config, and that the YAML files say the same as the dataclasses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import sbp_launch
from sbp_aten.pass_options import PassOptions
from sbp_core.errors import ConfigError
from sbp_core.plugins import (
    EmptyConfig,
    Factory,
    PluginEntry,
    PluginRegistry,
    PluginSource,
    discover,
    merge_settings,
)
from sbp_launch.compile_config import CompileConfig
from sbp_launch.settings.budget import Budget
from sbp_launch.settings.check import check, refuse_unknown
from sbp_launch.settings.config import PLUGIN_GROUPS, ComposedConfig, TrainerConfig

CONF = Path(sbp_launch.__file__).parent / "conf"
LAUNCH_ONLY = discover(
    [PluginSource(name="launch", value="sbp_launch.plugin", distribution="sbp-launch")]
)


def test_updates_behind_micro_batches_need_a_number_of_them() -> None:
    with pytest.raises(ConfigError, match="how many updates a step has"):
        TrainerConfig(micro_batches="auto", loss="each_micro_batch")


def test_updates_behind_several_micro_batches_divide_the_step() -> None:
    assert (
        TrainerConfig(
            batch_size=12, micro_batches=6, loss="each_micro_batch", micro_batches_per_update=3
        ).micro_batches_per_update
        == 3
    )

    with pytest.raises(ConfigError, match="does not divide into updates") as undivided:
        TrainerConfig(
            batch_size=12, micro_batches=6, loss="each_micro_batch", micro_batches_per_update=4
        )
    with pytest.raises(ConfigError, match="one update a step") as one:
        TrainerConfig(batch_size=12, micro_batches=6, micro_batches_per_update=3)

    assert undivided.value.accepted.endswith("1, 2, 3, 6")
    assert "trainer.loss=each_micro_batch" in one.value.todo


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (kind, name)
        for kind in ("optimizer", "cluster", "logger", "launcher")
        for name in LAUNCH_ONLY.names(kind)
        # Its config reads a file: see test_measured.
        if name != "measured"
    ],
)
def test_every_plugin_has_an_option_file_that_states_its_defaults(group: str, name: str) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))

    assert isinstance(values, dict)
    assert values.pop("name") == name
    config = LAUNCH_ONLY.factory(group, name).config
    assert LAUNCH_ONLY.configure(group, name, values) == config()
    assert set(values) == {field.name for field in fields(config)}


@pytest.mark.parametrize(
    ("group", "config"), [("trainer", TrainerConfig), ("compile", CompileConfig)]
)
def test_options_of_our_own_groups_state_the_defaults(group: str, config: type) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF / group / "default.yaml"))

    assert isinstance(values, dict)
    assert merge_settings(config, values) == config()
    assert set(values) == {field.name for field in fields(config)}


def test_every_pass_is_listed_with_its_settings() -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF / "compile" / "default.yaml"))

    assert isinstance(values, dict)
    assert set(values["passes"]) == {field.name for field in fields(PassOptions)}
    for name in ("recompute", "split_classes", "place_casts"):
        own = getattr(PassOptions(), name)
        assert set(values["passes"][name]) == {field.name for field in fields(own)}


@pytest.mark.parametrize("name", ["steps", "batch_size", "micro_batches", "log_every"])
def test_counts_that_cannot_be_zero_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.{name}=0 is too small"):
        merge_settings(TrainerConfig, {name: 0}, key="trainer")


@pytest.mark.parametrize("name", ["seed", "compare_steps", "sample_tokens", "plan_rows"])
def test_counts_may_be_zero_but_not_negative(name: str) -> None:
    assert getattr(merge_settings(TrainerConfig, {name: 0}), name) == 0
    with pytest.raises(ConfigError, match=f"trainer.{name}=-1 is too small"):
        merge_settings(TrainerConfig, {name: -1}, key="trainer")


@settings(derandomize=True, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 200))
def test_a_batch_is_accepted_exactly_if_its_parts_are_equal(batch: int, parts: int) -> None:
    if batch % parts:
        with pytest.raises(ConfigError, match="does not divide"):
            TrainerConfig(batch_size=batch, micro_batches=parts)
    else:
        config = TrainerConfig(batch_size=batch, micro_batches=parts)
        assert config.micro_batch_size * parts == batch


@pytest.mark.parametrize(
    ("settings", "unit", "amount"),
    [
        ({}, "steps", 300),
        ({"steps": 7}, "steps", 7),
        ({"epochs": 1.5}, "epochs", 1.5),
        ({"steps": None, "tokens": 10**9}, "tokens", 10**9),
        ({"hours": 2}, "hours", 2.0),
    ],
)
def test_a_run_has_one_budget(settings: dict[str, object], unit: str, amount: float) -> None:
    assert merge_settings(TrainerConfig, settings).budget == Budget(unit=unit, amount=amount)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"steps": 5, "hours": 1}, "trainer.steps is not the only budget: steps=5 and hours=1.0"),
        ({"epochs": 0}, "trainer.epochs=0.0 is no budget"),
        ({"hours": math.inf}, "trainer.hours=inf is no budget"),
        ({"epochs": math.nan}, "trainer.epochs=nan is no budget"),
        ({"tokens": 0}, "trainer.tokens=0 is too small"),
        ({"evaluate": {"every": 0}}, "trainer.evaluate.every=0 is too small"),
        ({"evaluate": {"batches": -1}}, "trainer.evaluate.batches=-1 is too small"),
    ],
)
def test_a_budget_or_an_evaluation_that_cannot_be_is_refused(
    settings: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        merge_settings(TrainerConfig, settings, key="trainer")
    assert caught.value.what == told


def test_callbacks_are_named_alone_or_with_their_settings() -> None:
    given = ["mine", {"name": "early_stop", "patience": 5}]

    choices = merge_settings(TrainerConfig, {"callbacks": given}).callback_choices

    assert [(one.name, dict(one.settings)) for one in choices] == [
        ("mine", {}),
        ("early_stop", {"patience": 5}),
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [([{"patience": 5}], "has no name"), (["mine", {"name": "mine"}], "'mine' is there twice")],
)
def test_a_callback_without_a_name_or_twice_is_refused(given: list[object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        merge_settings(TrainerConfig, {"callbacks": given}).callback_choices  # noqa: B018


def registry_of(configs: Mapping[str, type]) -> PluginRegistry:
    """Return a registry whose only plugin of each group is `x`; its config is empty or given."""
    return PluginRegistry(
        entries=tuple(
            PluginEntry(
                kind=group,
                name="x",
                distribution="d",
                version="1",
                api_version=1,
                factory=Factory(build="m:build", config=configs.get(group, EmptyConfig)),
            )
            for group in PLUGIN_GROUPS
        )
    )


def test_a_group_without_a_plugin_name_is_refused_with_its_file() -> None:
    composed = ComposedConfig(
        values={"model": {"width": 3}},
        files={"model": "there/model/odd.yaml"},
        overrides=(),
    )

    with pytest.raises(ConfigError) as caught:
        check(composed, LAUNCH_ONLY)

    assert caught.value.what == "model.name is not set"
    assert caught.value.where == ("there/model/odd.yaml",)


def test_a_cluster_whose_config_has_no_mesh_is_refused() -> None:
    values = {group: {"name": "x"} for group in PLUGIN_GROUPS}

    with pytest.raises(ConfigError, match="the cluster's config has no mesh and axes"):
        check(ComposedConfig(values=values, files={}, overrides=()), registry_of({}))


@dataclass(frozen=True)
class MeshConfig:
    mesh: tuple[int, ...] = (2,)
    axes: tuple[str, ...] = ("data",)


@dataclass(frozen=True)
class PickyConfig:
    """The config of a model that refuses any data."""

    def check_combination(self, others: Mapping[str, object]) -> None:
        raise ConfigError(f"{sorted(others)}: data.x does not fit", accepted="data.x=1")


def test_a_config_that_checks_others_is_asked_and_both_files_are_named() -> None:
    composed = ComposedConfig(
        values={group: {"name": "x"} for group in (*PLUGIN_GROUPS, "trainer", "compile")},
        files={group: f"there/{group}/x.yaml" for group in PLUGIN_GROUPS},
        overrides=("data.x=2", "trainer.steps=3"),
    )

    with pytest.raises(ConfigError) as caught:
        check(composed, registry_of({"cluster": MeshConfig, "model": PickyConfig}))

    others = sorted({*PLUGIN_GROUPS} - {"model"})
    assert caught.value.what == f"{others}: data.x does not fit"
    assert caught.value.where == (
        "there/model/x.yaml",
        "there/data/x.yaml",
        "the command line: data.x=2",
    )
    assert caught.value.accepted == "data.x=1"


def test_an_error_names_the_settings_that_it_tells_of_as_words_of_their_own() -> None:
    said = ("trainer.evaluate.batches=1", "trainer.batch_size=8", "trainer.micro_batches=3")
    composed = ComposedConfig(values={}, files={}, overrides=said)

    found = composed.overrides_of("trainer", "batch_size=8 does not divide into micro_batches=3")

    assert found == [f"the command line: {text}" for text in said[1:]]


@pytest.mark.parametrize("override", ["+experiment=small", "+recipe=big"])
def test_a_group_of_a_folder_that_is_not_named_is_answered_with_how_to_name_it(
    override: str,
) -> None:
    name, value = override[1:].split("=")
    composed = ComposedConfig(values={name: value}, files={}, overrides=(override,))

    with pytest.raises(ConfigError, match=f"'{name}'") as caught:
        refuse_unknown(composed, ("planner", "trainer"), registry_of({}))

    assert "--config-dir FOLDER" in caught.value.todo
