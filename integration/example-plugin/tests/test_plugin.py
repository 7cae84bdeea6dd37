import subprocess
import sys

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins import discover
from sbp_example_plugin.plugin import CallbackConfig, DataConfig, ModelConfig, PlannerConfig


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("planner", PlannerConfig()),
        ("model", ModelConfig()),
        ("data", DataConfig()),
        ("callback", CallbackConfig()),
    ],
)
def test_sbp_finds_all_plugins_and_blames_nothing_on_them(kind: str, config: object) -> None:
    registry = discover()

    entry = registry.entry(kind, "example")

    assert entry.distribution == "sbp-example-plugin"
    assert entry.health == "ok"
    assert registry.configure(kind, "example", {}) == config


def test_a_setting_that_cannot_be_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^model\.hidden=0"):
        discover().configure("model", "example", {"hidden": 0})


def test_the_hooks_are_read_without_torch() -> None:
    code = "import sys, sbp_example_plugin.plugin; print(*sys.modules)"

    modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "sbp_example_plugin.plugin" in modules
    assert "torch" not in modules
