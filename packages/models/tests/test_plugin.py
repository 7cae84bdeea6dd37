import importlib
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import entry_points
from importlib.resources import files
from types import ModuleType
from typing import Any

import pytest
import yaml

from sbp_core.plugins import API_VERSION, Factory, merge_settings
from sbp_models import plugin

FACTORIES = {
    **{("model", name): factory for name, factory in plugin.sbp_models().items()},
    **{("data", name): factory for name, factory in plugin.sbp_datasets().items()},
}


def read_option(group: str, name: str) -> dict[str, Any]:
    text = files("sbp_models.conf").joinpath(group, f"{name}.yaml").read_text("utf-8")
    option: dict[str, Any] = yaml.safe_load(text)
    option.pop("defaults", None)  # of Hydra: which data fit a model
    return option


def test_the_entry_point_leads_to_the_hooks() -> None:
    (entry,) = (entry for entry in entry_points(group="sbp") if entry.name == "sbp-models")

    found = entry.load()

    assert isinstance(found, ModuleType)
    assert found is plugin
    assert found.SBP_API_VERSION == API_VERSION


def test_the_package_brings_these_plugins() -> None:
    models = {"gpt", "llama", "moe", "bert", "t5", "resnet", "vit", "dlrm", "hf"}
    assert set(plugin.sbp_models()) == models
    at_hand = {"stdlib", "images", "clicks", "digits"}
    of_files = {"click_log", "hf_dataset", "image_folder", "text", "tokens", "webdataset"}
    assert set(plugin.sbp_datasets()) == at_hand | of_files
    assert plugin.sbp_config_folders() == ["pkg://sbp_models.conf"]


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=lambda factory: factory.build)
def test_every_factory_can_be_called(factory: Factory) -> None:
    module, _, name = factory.build.partition(":")

    assert callable(getattr(importlib.import_module(module), name))
    assert factory.summary


@pytest.mark.parametrize(("group", "name"), FACTORIES)
def test_every_option_has_the_settings_of_its_config_and_no_others(group: str, name: str) -> None:
    option = read_option(group, name)

    config = FACTORIES[group, name].config
    assert option.pop("name") == name
    assert set(option) == {field.name for field in fields(config)}


@pytest.mark.parametrize("name", sorted(set(plugin.sbp_models()) - {"hf"}))
def test_the_defaults_of_the_yaml_are_those_of_the_config(name: str) -> None:
    option = read_option("model", name)

    del option["name"]
    config = FACTORIES["model", name].config
    assert merge_settings(config, option) == config()


@pytest.mark.parametrize("name", ["images", "clicks", "digits"])
def test_the_data_ask_the_model_for_its_sizes_and_have_the_defaults_of_their_config(
    name: str,
) -> None:
    option = read_option("data", name)
    config = FACTORIES["data", name].config

    # Models of transformers have their sizes under `overrides`, which is asked second.
    of_transformers = re.compile(r"\$\{oc\.select:model\.overrides\.\w+,(\w*)\}")
    asked = {
        key: re.fullmatch(r"\$\{oc\.select:model\.(\w+),(.*)\}", of_transformers.sub(r"\1", value))
        for key, value in option.items()
        if isinstance(value, str) and value.startswith("$")
    }

    assert asked
    del option["name"]
    for key, match in asked.items():
        assert match is not None
        assert match[1] == key
        option[key] = yaml.safe_load(match[2])
    assert merge_settings(config, option) == config()


def test_hooks_and_configs_are_known_without_torch() -> None:
    code = (
        "import sys, sbp_models.plugin as p; p.sbp_models(); p.sbp_datasets(); print(*sys.modules)"
    )

    modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "sbp_models.configs" in modules
    assert {"torch", "numpy", "transformers"}.isdisjoint(modules)
