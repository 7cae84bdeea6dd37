"""The folder in which mistakes are made: files with one error each."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

#: Settings of a model that is captured and planned quickly.
SMALL = (
    "model.num_layers=1",
    "model.hidden=32",
    "model.num_heads=2",
    "model.context=16",
    "trainer.batch_size=4",
)

#: Planner and mesh of the strategy that is edited.
PLANNED = ("planner=manual/data_tensor", "cluster.mesh=[2,2]")

#: Settings of a run of one step, whose folder is reused.
_ONE_STEP = (
    "trainer.steps=1",
    "trainer.evaluate.batches=0",
    "trainer.sample_tokens=0",
    "hydra.run.dir=used",
)

#: Edits that break a good strategy, by the name of the file.
EDITS: dict[str, Callable[[str], str]] = {
    "extra_input.yaml": lambda text: re.sub(
        r"    gelu: .*", "    gelu: (B, S(2)) (B, B) -> (B, S(2))", text, count=1
    ),
    "no_such_dim.yaml": lambda text: re.sub(
        r"    gelu: .*", "    gelu: (B, S(7)) -> (B, S(7))", text, count=1
    ),
    "one_axis.yaml": lambda text: text.replace(
        "  embed.tokens.weight: (B, B)", "  embed.tokens.weight: (B)"
    ),
    "no_sbp.yaml": lambda text: text.replace(
        "  embed.tokens.weight: (B, B)", "  embed.tokens.weight: (B, X)"
    ),
    "illegal.yaml": lambda text: re.sub(
        r"    gelu: .*", "    gelu: (B, P) -> (B, P)", text, count=1
    ),
    "unknown_op.yaml": lambda text: re.sub(r"    gelu: ", "    gelo: ", text, count=1),
    "missing_op.yaml": lambda text: re.sub(r"    gelu: .*\n", "", text, count=1),
    "unknown_tensor.yaml": lambda text: text.replace(
        "  head.weight: (B, B)", "  haed.weight: (B, B)"
    ),
    "twice.yaml": lambda text: text.replace(
        "  head.weight: (B, B)", "  head.weight: (B, B)\n  head.weight: (B, S(0))"
    ),
    "tab.yaml": lambda text: text.replace("  head.weight: (B, B)", "\thead.weight: (B, B)"),
    "open.yaml": lambda text: text.replace("  axes: [data, tensor]", "  axes: [data, tensor"),
    "words.yaml": lambda text: text.replace("num_micro_batches: 1", "num_micro_batches: one", 1),
    "partial.yaml": lambda text: text.replace("  head.weight: (B, B)", "  head.weight: (B, P)"),
    "cut.yaml": lambda text: text[: text.index("storage:")],
}

_BROKEN_OPTION = """\
name: manual
pins: {batch: [S(0)
pipeline: 1f1b
"""

_NAMELESS_OPTION = """\
pins: {}
"""

_BROKEN_PLUGIN = "from sbp_core.plugins import Factory\nimport no_such_module\n"

_OLD_PLUGIN = """\
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 99


@hookimpl
def sbp_planners():
    return {"old": Factory(build="old_plugin:build")}
"""

_BAD_PLUGIN = """\
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 1


class Planner:
    def __init__(self, answer):
        self.answer = answer

    def plan(self, request):
        return self.answer(request)


def build_raising(config):
    def answer(request):
        return request.graph.no_such_thing

    return Planner(answer)


def build_silent(config):
    return Planner(lambda request: None)


@hookimpl
def sbp_planners():
    return {
        "raising": Factory(build="bad_plugin:build_raising"),
        "silent": Factory(build="bad_plugin:build_silent"),
    }


@hookimpl
def sbp_config_folders():
    return ["pkg://bad_conf"]
"""


def prepare(folder: Path) -> None:
    """Fill an empty folder with the files of the mistakes."""
    (folder / "text.txt").write_text("def answer():\n    return 42\n" * 500, "utf-8")
    (folder / "empty.txt").write_text("", "utf-8")
    (folder / "short.txt").write_text("short", "utf-8")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "one.bin").write_bytes(bytes(range(256)) * 64)
    (folder / "not_a_folder").write_text("a file", "utf-8")
    (folder / "cluster_cut.json").write_text('{"format": "sbp-cluster", "version"', "utf-8")
    (folder / "cluster_other.json").write_text('{"colour": "green"}', "utf-8")
    (folder / "plain.txt").write_text("no strategy", "utf-8")
    _options(folder / "conf" / "planner", broken=_BROKEN_OPTION)
    _options(folder / "conf_nameless" / "planner", nameless=_NAMELESS_OPTION)
    _plugin(folder / "plugins", "broken_plugin", _BROKEN_PLUGIN)
    _plugin(folder / "plugins_old", "old_plugin", _OLD_PLUGIN)
    _plugin(folder / "plugins_bad", "bad_plugin", _BAD_PLUGIN)
    _options(
        folder / "plugins_bad" / "bad_conf" / "planner",
        raising="name: raising\n",
        silent="name: silent\n",
    )
    (folder / "plugins_bad" / "bad_conf" / "__init__.py").write_text("", "utf-8")
    _strategies(folder)


def _options(folder: Path, **texts: str) -> None:
    """Write option files of a config group."""
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, "utf-8")


def _plugin(folder: Path, module: str, text: str) -> None:
    """Write a module and its package metadata, so that it is found as a plugin."""
    name = module.replace("_", "-")
    info = folder / f"{module}-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(text, "utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[sbp]\n{name} = {module}\n", "utf-8")


def _strategies(folder: Path) -> None:
    """Run one step of a small model, and write the edits of its strategy."""
    command = [sys.executable, "-m", "sbp_launch.apps.train", *SMALL, *PLANNED, *_ONE_STEP]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=250)
    good = (folder / "used" / "strategy.yaml").read_text("utf-8")
    for name, edit in EDITS.items():
        edited = edit(good)
        assert edited != good, f"{name} is no edit of this strategy"
        (folder / name).write_text(edited, "utf-8")
    (folder / "good.yaml").write_text(good, "utf-8")
    (folder / "not_utf8.yaml").write_bytes(good.encode("utf-16"))
    (folder / "empty.yaml").write_text("", "utf-8")
    (folder / "a_list.yaml").write_text("- B\n- S(0)\n", "utf-8")
    (folder / "cut.json").write_text('{"format": "sbp-strategy"', "utf-8")
