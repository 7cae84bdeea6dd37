"""Configs and the options of all packages: they are found by name, also by a former name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins import discover
from sbp_launch import compose
from sbp_launch.hydra_config import compose as composed_config
from sbp_launch.parallel.choices import Choices
from sbp_launch.parallel.ranks import backend_of, mesh_of
from sbp_launch.settings.catalog import make_catalog
from sbp_launch.settings.compose import renamed_overrides
from sbp_launch.world import World


def test_options_of_all_packages_are_found_and_settings_are_those_of_the_command() -> None:
    config = compose(["planner=manual/zero", "cluster.mesh=[2,1]", "trainer.steps=5"])

    assert (config.planner.name, config.model.name, config.data.name) == ("manual", "gpt", "stdlib")
    assert list(config.cluster.mesh) == [2, 1]
    assert config.trainer.steps == 5
    assert "hydra" not in config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("planner=manual/zeroo", "did you mean planner=manual/zero?"),
        ("trainer.stepz=5", "did you mean 'trainer.steps'?"),
        ("trainer.steps=0", ""),
    ],
)
def test_what_the_command_refuses_is_refused(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])

    assert says in caught.value.todo


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        ("planner=infer", "planner=propagate"),
        ("planner=infer,osdp", "planner=propagate,osdp"),
        ("+planner.tries={a: {}}", "+planner.pin_sets={a: {}}"),
        ("trainer.other_data=true", "trainer.allow_other_data=true"),
    ],
)
def test_former_names_of_options_and_settings_are_replaced(text: str, renamed: str) -> None:
    others = [
        "planner=file",
        "planner.path=infer",
        "~planner",
        "trainer.steps=3",
        "model=mine/infer",
    ]

    found = renamed_overrides([text, *others], make_catalog(discover()))

    assert found == {text: renamed}


def test_a_config_folder_may_use_the_former_name_of_an_option(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "mine.yaml").write_text("defaults: [infer]\nchunks: 2\n", "utf-8")

    with pytest.warns(FutureWarning, match="planner=infer has a new name: planner=propagate"):
        config = composed_config(["planner=infer"])
    mine = composed_config(["planner=mine"], config_dir=tmp_path)

    assert (config.planner.name, mine.planner.name, mine.planner.chunks) == (*["propagate"] * 2, 2)
    assert "infer" not in make_catalog(discover()).options("planner")


def test_the_former_name_of_a_planner_is_taken_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="planner=infer has a new name: planner=propagate"):
        option = Choices().option("planner", "infer")

    assert (option.chosen, option.name) == ("propagate", "propagate")


def test_boxing_over_processes_is_refused_if_only_one_was_started() -> None:
    one = World.of_environment({"RANK": "0", "WORLD_SIZE": "1"})

    with pytest.raises(ConfigError, match=r"torchrun has started one \(RANK=0, WORLD_SIZE=1\)"):
        backend_of(one, "torch", Choices(), mesh_of(one, 4))
