"""Templates for `sbp-plugins new KIND NAME`: write a package with a plugin that passes its checks.

Each kind has a module that builds it, in the folder `templates`, and settings; some have tests,
too. All other files are the same for all kinds. `$name` and the like are placeholders.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.plugins.hooks import API_VERSION, KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The properties of a kind's template, in addition to the texts in the folder `templates`.

    Args:
        setting: One setting of the config: name, type, default and meaning; None: no config.
        needs: The distribution of ours that it depends on.
        fields: More lines of the config.
        option: More lines of the option file.
        has_option: Whether it is chosen by an option of Hydra.
    """

    setting: tuple[str, str, str, str] | None
    needs: str = "sbp-core"
    fields: str = ""
    option: str = ""
    has_option: bool = True


#: Templates by kind; `tensor_library` has none, because only one of them may be installed.
TEMPLATES = {
    "boxing": Template(
        setting=("log_bytes", "bool", "True", "whether to log what ranks have sent"),
        needs="sbp-torch",
    ),
    "callback": Template(setting=("loss", "float", "0.0", "a low enough loss"), has_option=False),
    "cluster": Template(
        setting=("memory_bytes", "float", "1.6e10", "memory of a device"),
        fields="""
    mesh: tuple[int, ...] = (1,)  # ranks along each axis
    axes: tuple[str, ...] = ("data",)""",
        option="mesh: [1]  # ranks along each axis\naxes: [data]\n",
    ),
    "data": Template(setting=("size", "int", "1000", "samples to train on"), needs="sbp-torch"),
    "launcher": Template(
        setting=("threads_per_rank", "int", "1", "threads that one operator may use"),
        fields="\n    spans_processes: ClassVar[bool] = True  # each rank is a process",
    ),
    "logger": Template(setting=("file", "str", '"my_metrics.jsonl"', "file in the run folder")),
    "model": Template(setting=("hidden", "int", "16", "width"), needs="sbp-torch"),
    "optimizer": Template(setting=("lr", "float", "0.1", "learning rate"), needs="sbp-torch"),
    "pass": Template(
        setting=("enabled", "bool", "True", "whether it does anything"), has_option=False
    ),
    "planner": Template(
        setting=("whole_parameters", "bool", "True", "whether every rank keeps all parameters")
    ),
    "runtime": Template(
        setting=("slow_s", "float", "60.0", "seconds from which on a step is logged"),
        needs="sbp-torch",
    ),
    "signature": Template(setting=None, needs="sbp-torch", has_option=False),
    "storage": Template(setting=("folder", "str", '"my_checkpoints"', "folder in the run folder")),
}

_PLUGIN = '''\
"""The hooks of $name. It is read at each start of sbp, so it imports nothing heavy."""

from collections.abc import $collections
$config_imports
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = $version
$config_class

@hookimpl
def $hook() -> Mapping[str, Factory]:
    """Return name -> factory."""
    return {
        "$entry": Factory(
            build="$package.$module:build",$config_line
            summary="a $kind of mine",
        )
    }
'''

_CONFIG = '''

@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings; raise a ValueError in `__post_init__` for invalid values."""

    $setting: $type = $default  # $meaning$fields
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
addopts = "-p sbp_core.testing.suites --sbp-plugin $name -m 'not exhaustive'"
markers = ["exhaustive: takes long"]
"""

_TEST = """\
from sbp_core.plugins import discover


def test_sbp_finds_the_plugin() -> None:
    assert discover().entry("$kind", "$entry").health == "ok"
"""


def write_template(kind: str, name: str, folder: Path) -> Path:
    """Write a package with one plugin, and return its folder.

    Args:
        kind: A key of `TEMPLATES`.
        name: The name of the distribution: `my-planner`. The package and plugin are `my_planner`.
        folder: The parent of the new folder.

    Raises:
        ConfigError: the name is invalid, or the folder exists already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise ConfigError(
            f"{name!r} is no name of a distribution",
            accepted="small letters, digits and -, such as my-planner",
        )
    root, option = folder / name, name.replace("-", "_")
    template, texts = TEMPLATES[kind], files("sbp_core.plugins") / "templates"
    words = {
        "package": option,
        "option": option,
        "name": name,
        "entry": f"{option}.product.default" if kind == "signature" else option,
        "module": "graph_pass" if kind == "pass" else kind,
        "kind": kind,
        "hook": KINDS[kind],
        "version": str(API_VERSION),
        "collections": "Mapping, Sequence" if template.has_option else "Mapping",
        "needs": template.needs,
        "fields": template.fields,
        "config_class": _CONFIG if template.setting else "",
        "config_line": "\n            config=Config," if template.setting else "",
        "config_imports": "from dataclasses import dataclass\n" if template.setting else "",
    }
    if "ClassVar" in template.fields:
        words["config_imports"] += "from typing import ClassVar\n"
    setting, hint, default, meaning = template.setting or ("",) * 4
    words |= {"setting": setting, "type": hint, "default": default, "meaning": meaning}

    def filled(text: str) -> str:
        while "$" in text:  # a filled-in text may contain placeholders, too
            text = string.Template(text).substitute(words)
        return text

    source = f"src/{option}"
    written = {
        "pyproject.toml": _PROJECT,
        f"{source}/__init__.py": '"""A $kind of sbp."""\n',
        f"{source}/py.typed": "",
        f"{source}/plugin.py": _PLUGIN + (_FOLDERS if template.has_option else ""),
        f"{source}/$module.py": (texts / f"{kind}.py.txt").read_text("utf-8"),
        "tests/test_plugin.py": _TEST,
    }
    if (own := texts / f"test_{kind}.py.txt").is_file():
        written["tests/test_$kind.py"] = own.read_text("utf-8")
    if template.has_option:
        value = {"True": "true", "1.6e10": "1.6e+10"}.get(default, default)
        written[f"{source}/conf/__init__.py"] = '"""Hydra options of $name."""\n'
        written[f"{source}/conf/$kind/$option.yaml"] = (
            f"name: $option\n{setting}: {value}  # $meaning\n{template.option}"
        )
    try:
        root.mkdir()
    except OSError as error:
        raise ConfigError(
            f"the folder {root} cannot be made: {error.strerror}", todo="choose another name"
        ) from error
    for file, text in written.items():
        path = root / filled(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled(text), encoding="utf-8")
    return root
