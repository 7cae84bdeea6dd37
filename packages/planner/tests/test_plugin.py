import importlib
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import entry_points
from importlib.resources import files

import pytest
import yaml

from sbp_core.plugins import API_VERSION, merge_settings
from sbp_planner import plugin

FACTORIES = plugin.sbp_planners()
PRESETS = [
    "custom",
    "data_parallel",
    "tensor_parallel",
    "data_tensor",
    "class_parallel",
    "table_parallel",
    "expert_parallel",
    "sequence_parallel",
    "zero",
    "zero1",
    "zero2",
    "hsdp",
    "pipeline",
    "layout",
    "megatron",
]
#: Names of other systems for presets.
OTHER_NAMES = ["fsdp", "oss", "pipe", "sdp"]
SEARCHES = ["auto", "exhaustive", "greedy", "ilp", "mcmc", "optcnn", "tofu"]
PLACERS = ["dlplacer", "stanza"]
PIPELINES = ["alpa", "galvatron", "gpipe", "pipedream"]
OPTIONS = [
    *(f"manual/{name}" for name in PRESETS),
    "propagate",
    "osdp",
    "file",
    *SEARCHES,
    *PIPELINES,
    *PLACERS,
]


@pytest.fixture(autouse=True)
def in_a_folder_with_a_strategy(tmp_path, monkeypatch):
    """`planner=file` reads `strategy.yaml` by default, and refuses a file that is not there."""
    (tmp_path / "strategy.yaml").write_text("planner: manual")
    monkeypatch.chdir(tmp_path)


def read_option(name):
    text = files("sbp_planner.conf").joinpath("planner", f"{name}.yaml").read_text("utf-8")
    return yaml.safe_load(text)


def test_the_entry_point_leads_to_the_hooks():
    (entry,) = (entry for entry in entry_points(group="sbp") if entry.name == "sbp-planner")

    assert entry.load() is plugin
    assert plugin.SBP_API_VERSION == API_VERSION


def test_the_package_brings_these_planners():
    assert set(FACTORIES) == {
        "propagate",
        "manual",
        "osdp",
        "file",
        *SEARCHES,
        *PIPELINES,
        *PLACERS,
    }
    assert plugin.sbp_config_folders() == ["pkg://sbp_planner.conf"]


@pytest.mark.parametrize("name", FACTORIES)
def test_every_factory_builds_a_planner(name):
    module, _, attribute = FACTORIES[name].build.partition(":")

    planner = getattr(importlib.import_module(module), attribute)(FACTORIES[name].config())

    assert callable(planner.plan)
    assert FACTORIES[name].summary


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_the_settings_of_its_config_and_no_others(name):
    option = read_option(name)

    config = FACTORIES[option.pop("name")].config
    assert set(option) == {field.name for field in fields(config)}
    merge_settings(config, option)


def test_every_option_file_is_tested():
    folder = files("sbp_planner.conf").joinpath("planner")

    found = {
        f"{inner.name}/{entry.name}" if inner else entry.name
        for inner in (None, folder.joinpath("manual"))
        for entry in (inner or folder).iterdir()
        if entry.name.endswith(".yaml")
    }

    former = {name for one in FACTORIES.values() for name in one.former_names}
    others = [f"manual/{name}" for name in OTHER_NAMES]
    assert found == {f"{name}.yaml" for name in (*OPTIONS, *former, *others)}


@pytest.mark.slow
def test_planning_does_not_import_torch():
    code = (
        "import sys, sbp_planner.plugin, sbp_planner.manual, sbp_planner.propagate;"
        "import sbp_planner.osdp, sbp_planner.file;"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
