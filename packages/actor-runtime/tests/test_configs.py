from importlib.resources import files
from typing import Any

import pytest

from sbp_actor_runtime.configs import ActorConfig
from sbp_core.errors import ConfigError


def test_the_defaults_are_those_of_the_option_file() -> None:
    text = files("sbp_actor_runtime.conf").joinpath("runtime/actor.yaml").read_text("utf-8")
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    pairs = dict(line.split(": ") for line in lines if line)

    assert pairs.pop("name") == "actor"
    assert pairs.pop("debug_fingerprints") == "false"
    assert pairs.pop("compile") == "eager"
    assert pairs.pop("threads_per_rank") == "null"
    assert ActorConfig().threads_per_rank is None
    assert pairs.pop("compile_fallback") == "false"
    config = ActorConfig()
    assert not config.debug_fingerprints
    assert (config.compile, config.compile_fallback) == ("eager", False)
    assert {key: float(value) for key, value in pairs.items()} == {
        "first_deadline_s": config.first_deadline_s,
        "deadline_s": config.deadline_s,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads_per_rank", 0), ("deadline_s", 0.0), ("deadline_s", -1.0), ("first_deadline_s", 0.0)],
)
def test_a_setting_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ActorConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"compile": "indctor"}, r"compile='indctor'(.*\n)*.*'inductor'"),
        ({"compile_fallback": True}, "compile_fallback=true with compile=eager"),
    ],
)
def test_settings_of_segments_that_do_not_go_together_are_refused(
    settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        ActorConfig(**settings)


def test_a_deadline_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="deadline_s"):
        ActorConfig(deadline_s=float("nan"))
