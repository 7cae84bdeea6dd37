"""What `sbp-plugins new KIND NAME` writes: a package with one plugin, which passes its checks.

Each kind has the settings of its config and a module that builds it; all else is the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.plugins.hooks import API_VERSION, KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What differs between kinds.

    Args:
        module: Text of the module with `build`; `$package` stands for the package.
        setting: One setting of the config: name, type, default and meaning.
        needs: The distribution of ours that it needs.
    """

    module: str
    setting: tuple[str, str, str, str]
    needs: str = "sbp-core"


_PLANNER = '''\
from dataclasses import dataclass

from sbp_core.infer import PinValue, infer_strategy
from sbp_core.plugins import PlanRequest
from sbp_core.strategy import Strategy

from $package.plugin import Config


@dataclass(frozen=True, slots=True)
class MyPlanner:
    """Splits the batch on the first mesh axis; sbp infers the rest."""

    config: Config

    def plan(self, request: PlanRequest) -> Strategy:
        """Return a strategy for the graph."""
        pins: dict[str, PinValue] = {"batch": {request.mesh.axes[0]: "S(0)", "*": "B"}}
        if self.config.whole_parameters:
            pins["parameters"] = "B"
        return infer_strategy(request, planner="$option", pins=pins)


def build(config: Config) -> MyPlanner:
    """Make the planner."""
    return MyPlanner(config)
'''

_CALLBACK = '''\
from collections.abc import Mapping

from sbp_core.plugins import Callback, TrainerControl, TrainerState

from $package.plugin import Config


class MyCallback(Callback):
    """Ends a run whose loss is low enough."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_step_end(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        """Ask for the end, or for nothing."""
        if metrics["loss"] > self.config.loss:
            return None
        return TrainerControl(stop=f"the loss is at most {self.config.loss}")


def build(config: Config) -> MyCallback:
    """Make the callback."""
    return MyCallback(config)
'''

_LOGGER = '''\
import json
from collections.abc import Mapping
from pathlib import Path

from sbp_core.plugins import MetricSink, MetricSinkFactory

from $package.plugin import Config


class MySink:
    """Writes one JSON object a line and step."""

    def __init__(self, config: Config, run_folder: Path, *, resumed_step: int = 0) -> None:
        path = run_folder / config.file
        lines = path.read_text("utf-8").splitlines() if resumed_step and path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= resumed_step]
        path.write_text("".join(f"{line}\\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, at once: a run may be killed."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def build(config: Config) -> MetricSinkFactory:
    """Return what makes the sink of a run."""

    def make(run_folder: Path, *, resumed_step: int = 0) -> MetricSink:
        return MySink(config, run_folder, resumed_step=resumed_step)

    return make
'''

_CLUSTER = '''\
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.plugins import ClusterFactory

from $package.plugin import Config


def build(config: Config) -> ClusterFactory:
    """Return what describes a machine of so many devices, all in one node."""

    def make(num_devices: int) -> Cluster:
        return Cluster(
            name="$option",
            num_devices=num_devices,
            devices_per_node=num_devices,
            device=Device(
                memory_bytes=config.memory_bytes,
                flop_per_s={"float32": 1e12},
                memory_bytes_per_s=1e11,
            ),
            intra_node=Link(latency_s=1e-5, bytes_per_s=1e10),
        )

    return make
'''

_DATA = '''\
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import unknown_name

from $package.plugin import Config


class MyData:
    """Sample i is the point (i, i + 1), and its sum."""

    def __init__(self, config: Config) -> None:
        self._sizes = {"train": config.size, "validation": -(-config.size // 10)}

    def num_samples(self, split: str = "train") -> int:
        """Return how many samples a split has."""
        if split not in self._sizes:
            raise unknown_name("split", split, self._sizes)
        return self._sizes[split]

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return `x`, float32 (n, 2), and `y`, float32 (n, 1): a pure function of `numbers`."""
        self.num_samples(split)  # refuses a split that is not there
        first = numbers + (self.num_samples("train") if split == "validation" else 0)
        x = torch.from_numpy(np.stack([first, first + 1], axis=1).astype(np.float32))
        return {"x": x, "y": x.sum(dim=1, keepdim=True)}

    def describe(self) -> str:
        """Return one line: what the data are."""
        return f"{self.num_samples():,} points and their sums"


def build(config: Config) -> MyData:
    """Make the data set."""
    return MyData(config)
'''

_MODEL = '''\
from collections.abc import Mapping

import torch
from torch import nn

from $package.plugin import Config



class MyModel(nn.Module):
    """Two layers, and the loss of a batch with `x` and `y`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = nn.Linear(2, config.hidden)
        self.last = nn.Linear(config.hidden, 1)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error of `x`, float32 (n, 2), against `y`, float32 (n, 1)."""
        found = self.last(torch.relu(self.first(batch["x"])))
        return nn.functional.mse_loss(found, batch["y"])


def build(config: Config) -> MyModel:
    """Make the model; the trainer has seeded torch before."""
    return MyModel(config)
'''

_OPTIMIZER = '''\
from collections.abc import Iterable

import torch

from sbp_torch.kinds import OptimizerFactory

from $package.plugin import Config


def build(config: Config) -> OptimizerFactory:
    """Return what makes the optimizer of parameters."""

    def make(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=config.lr, foreach=False)

    return make
'''

_PASS = '''\
from sbp_core.graph import LogicalGraph
from sbp_core.plugins import GraphPass

from $package.plugin import Config


def build(config: Config) -> GraphPass:
    """Return the pass: a pure function of a graph."""

    def rewrite(graph: LogicalGraph) -> LogicalGraph:
        return graph  # or another one, if config.enabled

    return rewrite
'''

TEMPLATES = {
    "callback": Template(
        module=_CALLBACK, setting=("loss", "float", "0.0", "that is low enough")
    ),
    "cluster": Template(
        module=_CLUSTER, setting=("memory_bytes", "float", "1.6e10", "of a device")
    ),
    "data": Template(
        module=_DATA, setting=("size", "int", "1000", "samples to train on"), needs="sbp-torch"
    ),
    "logger": Template(
        module=_LOGGER, setting=("file", "str", '"my_metrics.jsonl"', "in the run folder")
    ),
    "model": Template(
        module=_MODEL, setting=("hidden", "int", "16", "width"), needs="sbp-torch"
    ),
    "optimizer": Template(
        module=_OPTIMIZER, setting=("lr", "float", "0.1", "learning rate"), needs="sbp-torch"
    ),
    "pass": Template(
        module=_PASS, setting=("enabled", "bool", "True", "whether it does anything")
    ),
    "planner": Template(
        module=_PLANNER,
        setting=("whole_parameters", "bool", "True", "whether every rank keeps all parameters"),
    ),
}  # fmt: skip

_PLUGIN = '''\
"""The hooks of $name. It is read at each start of sbp, so it imports nothing heavy."""

from collections.abc import $collections
from dataclasses import dataclass

from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = $version


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings; raise a ValueError in `__post_init__` for those that cannot be meant."""

    $setting: $type = $default  # $meaning$more


@hookimpl
def $hook() -> Mapping[str, Factory]:
    """Return name -> factory."""
    return {
        "$option": Factory(
            build="$package.$kind_module:build",
            config=Config,
            summary="a $kind of mine",
        )
    }

'''

_FOLDERS = '''

@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Return the folder with $kind/$option.yaml."""
    return ["pkg://$package.conf"]
'''

_PROJECT = """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "$name"
version = "0.1.0"
description = "A $kind of sbp"
requires-python = ">=3.11"
dependencies = ["$needs>=0.1,<0.2"]

[project.optional-dependencies]
test = ["pytest>=8", "pyyaml>=6"]

[project.entry-points.sbp]
$name = "$package.plugin"

[tool.hatch.build.targets.wheel]
packages = ["src/$package"]

# The checks of sbp-plugins and the conformance suite run with your own tests.
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "-p sbp_core.testing.suites --sbp-plugin $name"
markers = ["exhaustive: takes long"]
"""

_TEST = """\
from sbp_core.plugins import discover

from $package.plugin import Config


def test_sbp_finds_the_plugin() -> None:
    registry = discover()

    assert registry.entry("$kind", "$option").health == "ok"
    assert registry.configure("$kind", "$option", {}) == Config()
"""

_MODEL_TEST = '''

class TestModel(ModelConformance):
    """The suite asks for a batch, too."""

    def make_model(self) -> MyModel:
        return build(Config())

    def make_batch(self, batch_size: int) -> Mapping[str, torch.Tensor]:
        x = torch.arange(2.0 * batch_size).reshape(batch_size, 2)
        return {"x": x, "y": x.sum(dim=1, keepdim=True)}
'''

_MODEL_IMPORTS = """\
from collections.abc import Mapping

import torch
from sbp_core.plugins import discover
from sbp_torch.testing.model import ModelConformance

from $package.model import MyModel, build
from $package.plugin import Config


"""


def write_template(kind: str, name: str, folder: Path) -> Path:
    """Write a package with one plugin, and return its folder.

    Args:
        kind: A key of `TEMPLATES`.
        name: Of the distribution: `my-planner`. The plugin and the package are called `my_planner`.
        folder: In which its folder is made.

    Raises:
        ConfigError: the name is none, or there is something of that name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise ConfigError(
            f"{name!r} is no name of a distribution",
            accepted="small letters, digits and -, such as my-planner",
        )
    root, option = folder / name, name.replace("-", "_")
    template = TEMPLATES[kind]
    has_option = kind not in ("callback", "pass")  # named in trainer.callbacks, compile.plugins
    setting, hint, default, meaning = template.setting
    words = {
        "package": option,
        "option": option,
        "name": name,
        "kind_module": "graph_pass" if kind == "pass" else kind,
        "kind": kind,
        "hook": KINDS[kind],
        "version": str(API_VERSION),
        "collections": "Mapping, Sequence" if has_option else "Mapping",
        "setting": setting,
        "type": hint,
        "default": default,
        "meaning": meaning,
        "needs": template.needs,
        "more": _MESH if kind == "cluster" else "",
    }

    def filled(text: str) -> str:
        for word in sorted(words, key=len, reverse=True):
            text = text.replace(f"${word}", words[word])
        return re.sub(r"\n{4,}", "\n\n\n", text).rstrip("\n") + "\n" * bool(text)

    own = '"""The $kind of $name."""\n\n'
    test = _TEST
    if kind == "model":
        test = _MODEL_IMPORTS + test.partition("\n\n\n")[2] + _MODEL_TEST
    source = f"src/{option}"
    files = {
        "pyproject.toml": _PROJECT,
        f"{source}/__init__.py": '"""A $kind of sbp."""\n',
        f"{source}/py.typed": "",
        f"{source}/plugin.py": _PLUGIN + (_FOLDERS if has_option else ""),
        f"{source}/{words['kind_module']}.py": own + template.module,
        f"tests/test_{option}.py": test,
    }
    if has_option:
        files[f"{source}/conf/__init__.py"] = '"""Hydra options of $name."""\n'
        value = {"True": "true", "1.6e10": "1.6e+10"}.get(default, default)
        more = "mesh: [1]  # ranks along each axis\naxes: [data]\n" if kind == "cluster" else ""
        files[f"{source}/conf/{kind}/{option}.yaml"] = (
            f"name: $option\n{setting}: {value}  # $meaning\n{more}"
        )
    try:
        root.mkdir()
    except OSError as error:
        raise ConfigError(
            f"the folder {root} cannot be made: {error.strerror}", todo="choose another name"
        ) from error
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(filled(text), encoding="utf-8")
    return root


#: What each config of a cluster has, too.
_MESH = """
    mesh: tuple[int, ...] = (1,)  # ranks along each axis
    axes: tuple[str, ...] = ("data",)"""
