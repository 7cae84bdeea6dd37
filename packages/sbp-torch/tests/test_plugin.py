"""What sbp-torch offers through the door that every plugin uses."""

from __future__ import annotations

from pathlib import Path

import sbp_torch.plugin
from sbp_core.plugins import PluginSource, discover

OURS = PluginSource(
    name="sbp-torch", value="sbp_torch.plugin", distribution="sbp-torch", version="0.1.0"
)


def test_everything_that_a_config_names_has_an_option_file() -> None:
    registry = discover([OURS], strict=True)
    offered = [entry for entry in registry.entries if entry.kind != "tensor_library"]

    files = [
        Path(sbp_torch.plugin.__file__).parent / "conf" / entry.kind / f"{entry.name}.yaml"
        for entry in offered
    ]

    assert [(entry.kind, entry.name) for entry in offered] == [
        ("boxing", "local"),
        ("runtime", "reference"),
    ]
    for file, entry in zip(files, offered, strict=True):
        assert f"name: {entry.name}" in file.read_text(encoding="utf-8").splitlines()


def test_pytorch_is_the_tensor_library() -> None:
    assert discover([OURS], strict=True).names("tensor_library") == ("torch",)
