import importlib
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

import pytest
import yaml

from sbp_boxing_nccl import plugin
from sbp_boxing_nccl.configs import MpiBoxingConfig, NcclBoxingConfig
from sbp_core.plugins import API_VERSION


def test_the_entry_point_leads_to_the_hooks() -> None:
    (entry,) = (entry for entry in entry_points(group="sbp") if entry.name == "sbp-boxing-nccl")

    found = entry.load()

    assert found is plugin
    assert plugin.SBP_API_VERSION == API_VERSION


def test_the_package_brings_two_backends_which_can_be_built() -> None:
    backends = plugin.sbp_boxing_backends()

    assert set(backends) == {"mpi", "nccl"}
    for factory in backends.values():
        module, _, function = factory.build.partition(":")
        backend = getattr(importlib.import_module(module), function)(factory.config())
        assert backend.local_ranks() == ()
        assert backend.spans_processes


@pytest.mark.parametrize(("name", "config"), [("mpi", MpiBoxingConfig), ("nccl", NcclBoxingConfig)])
def test_an_option_has_the_settings_of_its_config_and_their_defaults(
    name: str, config: type[Any]
) -> None:
    (folder,) = plugin.sbp_config_folders()
    path = files(folder.removeprefix("pkg://")).joinpath("boxing", f"{name}.yaml")

    option = yaml.safe_load(path.read_text("utf-8"))

    assert option.pop("name") == name
    assert set(option) == {field.name for field in fields(config)}
    assert config(**option) == config()


def test_hooks_and_configs_are_known_without_torch_mpi_and_cupy() -> None:
    code = "import sys, sbp_boxing_nccl.plugin as p; p.sbp_boxing_backends(); print(*sys.modules)"

    modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "sbp_boxing_nccl.configs" in modules
    assert {"torch", "numpy", "mpi4py", "cupy"}.isdisjoint(modules)
