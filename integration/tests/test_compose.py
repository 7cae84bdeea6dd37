"""Configs and the options of all packages: they are found by name, also by a former name."""

from __future__ import annotations

from pathlib import Path

import pytest
from plain_training import batch_of, loss_of, make_model, make_optimizer

from sbp_core.errors import ConfigError
from sbp_launch import compose, parallelize


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
    ("given", "says"),
    [
        (["planner=infer"], "planner=infer has a new name: planner=propagate"),
        (["+planner.tries={a: {}}"], r"\+planner.tries=.* has a new name: \+planner.pin_sets="),
        (
            ["trainer.other_data=true"],
            "trainer.other_data=true has a new name: trainer.allow_other_data",
        ),
    ],
)
def test_former_names_of_options_and_settings_are_taken_with_a_warning(
    given: list[str], says: str
) -> None:
    with pytest.warns(FutureWarning, match=says):
        config = compose(given)

    assert config.planner.name == "propagate"
    assert config.trainer.allow_other_data == ("trainer.other_data=true" in given)


def test_a_config_folder_may_use_the_former_name_of_an_option(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "mine.yaml").write_text("defaults: [infer]\nchunks: 2\n", "utf-8")

    config = compose(["planner=mine"], config_dir=tmp_path)

    assert (config.planner.name, config.planner.chunks) == ("propagate", 2)


def test_the_former_name_of_a_planner_is_taken_by_parallelize() -> None:
    model = make_model()

    with (
        pytest.warns(FutureWarning, match="planner=infer has a new name: planner=propagate"),
        parallelize(model, loss_of, batch_of(0), make_optimizer(model), planner="infer") as step,
    ):
        assert step.plan.planner == "propagate"


def test_boxing_over_processes_is_refused_if_only_one_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = make_model()

    with pytest.raises(ConfigError, match=r"torchrun has started one \(RANK=0, WORLD_SIZE=1\)"):
        parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=4, boxing="torch")
