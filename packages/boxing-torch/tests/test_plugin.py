import importlib
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import entry_points
from importlib.resources import files

import yaml

from sbp_boxing_torch import plugin
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.plugins import API_VERSION


def test_the_entry_point_leads_to_the_hooks() -> None:
    (entry,) = (entry for entry in entry_points(group="sbp") if entry.name == "sbp-boxing-torch")

    found = entry.load()

    assert found is plugin
    assert plugin.SBP_API_VERSION == API_VERSION


def test_the_package_brings_one_backend_which_can_be_built() -> None:
    ((name, factory),) = plugin.sbp_boxing_backends().items()

    module, _, function = factory.build.partition(":")
    backend = getattr(importlib.import_module(module), function)(factory.config())

    assert name == "torch"
    assert backend.local_ranks() == ()


def test_the_option_has_the_settings_of_the_config_and_their_defaults() -> None:
    (folder,) = plugin.sbp_config_folders()
    text = files(folder.removeprefix("pkg://")).joinpath("boxing", "torch.yaml").read_text("utf-8")

    option = yaml.safe_load(text)

    assert option.pop("name") == "torch"
    assert set(option) == {field.name for field in fields(TorchBoxingConfig)}
    assert TorchBoxingConfig(**option) == TorchBoxingConfig()


def test_hooks_and_configs_are_known_without_torch() -> None:
    code = "import sys, sbp_boxing_torch.plugin as p; p.sbp_boxing_backends(); print(*sys.modules)"

    modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "sbp_boxing_torch.configs" in modules
    assert {"torch", "numpy"}.isdisjoint(modules)
