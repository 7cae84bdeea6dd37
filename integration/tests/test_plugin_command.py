"""`sbp-plugins check` and `new`: our own plugins, packages of the template, and broken ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from sbp_core.plugins import KINDS
from sbp_core.testing.plugin_check import PluginCheck

OURS = sorted({one.dist.name for one in entry_points(group="sbp") if one.dist is not None})

#: All but the one of which only one may be installed.
TEMPLATES = sorted(KINDS.keys() - {"tensor_library"})

CHECKS = ("hooks", "imports", "builds", "options", "rules", "callbacks")


def command(
    *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `sbp-plugins`."""
    return subprocess.run(
        [sys.executable, "-m", "sbp_core.plugins.cli", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def installed(root: Path, name: str, value: str) -> dict[str, str]:
    """Lay metadata beside a package; return the environment in which it is installed."""
    info = root / f"{name}-1.0.dist-info"
    info.mkdir()
    head = "Metadata-Version: 2.1"
    (info / "METADATA").write_text(f"{head}\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[sbp]\n{name} = {value}\n", encoding="utf-8")
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", OURS)
def test_our_own_plugins_are_whole(name: str) -> None:
    plugin = PluginCheck.of(name)

    faults = [fault for check in CHECKS for fault in getattr(plugin, f"check_{check}")()]

    assert faults == []


def begun(kind: str, folder: Path) -> Path:
    """Write a package of the template, lay metadata beside it, and return its folder."""
    command("new", kind, f"own-{kind}", folder=folder)
    installed(folder / f"own-{kind}" / "src", f"own-{kind}", f"own_{kind}.plugin")
    return folder / f"own-{kind}"


def run_pytest(folder: Path, roots: Sequence[Path], *arguments: str) -> str:
    """Run pytest in a folder, with packages of the template on the path; return what it says."""
    path = os.pathsep.join([*(str(root / "src") for root in roots), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_package_of_the_template_runs_the_checks_with_its_tests(tmp_path: Path) -> None:
    root = begun("callback", tmp_path)

    said = run_pytest(root, [root])

    assert "tests/test_plugin.py::test_sbp_finds_the_plugin PASSED" in said
    assert "own-callback::TestPlugin::test_hooks PASSED" in said


@pytest.mark.slow
def test_packages_of_all_templates_pass_their_tests_and_the_checks(tmp_path: Path) -> None:
    roots = [begun(kind, tmp_path) for kind in TEMPLATES]
    plugins = [f"--sbp-plugin=own-{kind}" for kind in TEMPLATES]
    # Of the suites that take long, some tests: plugins of ours pass the whole.
    skipped = "snapshot or several_micro_batches or pipeline or missing or named"
    selected = ("-m", "not exhaustive", "-k", f"not ({skipped})", "--import-mode=importlib")

    said = run_pytest(tmp_path, roots, "-p", "sbp_core.testing.suites", *plugins, *selected)

    passed = {kind: len(re.findall(rf"^own-{kind}\b.* PASSED", said, re.M)) for kind in TEMPLATES}
    assert {kind: number for kind, number in passed.items() if number <= 7} == {}


PLUGIN = """
from dataclasses import dataclass
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 2

@dataclass(frozen=True)
class Config:
    size: int = 1
    path: str = "a"

@hookimpl
def sbp_planners():
    return {
        "good": Factory(build="broken_plugin.parts:good", config=Config),
        "lost": Factory(build="broken_plugin.parts:nowhere"),
        "args": Factory(build="broken_plugin.parts:args"),
    }

@hookimpl
def sbp_callbacks():
    return {"calls": Factory(build="broken_plugin.parts:Calls")}

@hookimpl
def sbp_loggers():
    pass

@hookimpl
def sbp_signatures():
    return {
        "aten.mm.default": Factory(build="broken_plugin.parts:wrong_notation"),
        "no_such.op.default": Factory(build="broken_plugin.parts:notation"),
        "aten.dot.default": Factory(build="broken_plugin.parts:one"),
        "aten.mv.default": Factory(build="broken_plugin.parts:unreadable"),
    }

@hookimpl
def sbp_config_folders():
    return ["pkg://broken_plugin.conf"]
"""

PARTS = """
from sbp_core.plugins import Callback
def good(config): return None
def args(): return None
def notation(config): return "i k, k j -> i j"
def one(config): return "i -> i"
def wrong_notation(config): return "i k, k j -> i j; reduce k max"
def unreadable(config): return "i k, k"
class Calls(Callback):
    def __init__(self, config): pass
    def on_step_ended(self, state, metrics): pass
    def on_save(self, state): pass
"""

OPTIONS = {
    "planner/good.yaml": "name: good\nsize: 2\npath: ${oc.select:data.path,a}\n",
    "planner/other.yaml": "name: good\nsise: 2\n",
    "planner/nobody.yaml": "name: nobody\n",
    "planner/args.yml": "name: args\n",
    "planner/text.yaml": "[1\n",
    "planers/good.yaml": "name: good\n",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `sbp-plugins check` says of a plugin that is broken in many ways."""
    root = tmp_path_factory.mktemp("broken")
    package = root / "broken_plugin"
    files = {"__init__.py": "", "plugin.py": PLUGIN, "parts.py": PARTS, "bad.py": "1 / 0"}
    files |= {"optional.py": "import no_such_library"}
    files |= {f"conf/{name}": text for name, text in {"__init__.py": "", **OPTIONS}.items()}
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    environment = installed(root, "broken-plugin", "broken_plugin.plugin")
    chosen = ("--", "-k", "TestPlugin")
    done = command("check", "broken-plugin", *chosen, folder=root, environment=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "fault",
    [
        "sbp_loggers returns nothing",
        "broken_plugin.bad cannot be imported: ZeroDivisionError",
        "planner 'lost' names broken_plugin.parts:nowhere, which cannot be called",
        "planner 'args': broken_plugin.parts:args does not take the config",
        "planner/good.yaml: size is 2 here, and 1 by default in Config: say the same in both",
        "planner/other.yaml: no setting is called 'planner.sise'",
        "planner/nobody.yaml: planner=nobody: ",
        "planner/args.yml: options end in .yaml",
        "planner/text.yaml: this is no YAML",
        "conf/planers is the folder of no kind; did you mean planner?",
        "planner 'lost' cannot be chosen: no config folder has planner/lost.yaml",
        "execution refutes the rule of aten.mm.default",
        "no operator no_such.op.default is registered",
        "signature 'aten.mv.default': ",
        "aten.dot.default takes 2 tensors, the notation 'i -> i' has 1",
        "nobody calls the method on_step_ended; did you mean on_step_end?",
        "nobody calls the method on_save; known: load_state_dict, on_evaluate",
    ],
)
def test_what_is_wrong_is_said(told: str, fault: str) -> None:
    assert fault in told


def test_a_setting_that_another_group_gives_and_a_package_that_is_lacking_are_no_faults(
    told: str,
) -> None:
    assert "path is" not in told
    assert "no_such_library" not in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["new", "planner", "taken"], "the folder taken cannot be made: File exists"),
        (["new", "planner", "Not A Name"], "'Not A Name' is no name of a distribution"),
        (["check", "sbp-lunch"], "did you mean 'sbp-launch'?"),
        (["check", "taken"], "to fix it: pip install -e taken"),
        (["check", "nobody"], "no installed distribution 'nobody' has an entry point"),
    ],
)
def test_a_name_that_is_taken_or_none_or_of_no_plugin_is_refused(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "taken").mkdir()

    done = command(*arguments, folder=tmp_path)

    assert done.returncode == 2
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
