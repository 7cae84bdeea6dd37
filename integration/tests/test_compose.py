"""`sbp_launch.compose` beside all packages: it finds their options, as `sbp-train` does."""

from __future__ import annotations

import pytest

from sbp_core.errors import ConfigError
from sbp_launch import compose


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
