"""A stand-in distribution for what other packages bring, and what a child process reports.

The tests of sbp-launch must pass with sbp-core alone, so the model, the data and the planner of a
run come from a distribution that is written here and put on the path of a child process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sbp_launch.settings.config import PLUGIN_GROUPS

PLUGIN = """
from dataclasses import dataclass
from sbp_core.errors import ConfigError
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 1

@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig:
    width: int = 8
    depth: int = 2

    def __post_init__(self):
        if self.width < 1:
            raise ConfigError(f"width={self.width} is too small", accepted="an integer >= 1")

@hookimpl
def sbp_models():
    return {"toy": Factory(build="no_such_module:build", config=ToyConfig, summary="a toy")}

@hookimpl
def sbp_datasets():
    return {"toy": Factory(build="no_such_module:build")}

@hookimpl
def sbp_planners():
    return {"toy": Factory(build="no_such_module:build"), "toys": Factory(build="a:b")}

@hookimpl
def sbp_config_folders():
    return ["pkg://toy_package.conf"]
"""

#: Options that replace the defaults which other packages bring.
TOYS = ("model=toy", "data=toy", "planner=toy", "runtime=reference")

OPTIONS = {
    "model/toy": "name: toy\nwidth: 8\n",
    "model/strange": "name: toyy\n",
    "model/hollow": "name: toy\nwidth: ???  # the columns, 8 or 16\n",
    "model/hollow/filled": "name: toy\nwidth: 8\n",
    "model/hollow/shown": "name: toy\nwidth: ???  # model.width=COLUMNS\n",
    "model/lost": "name: toy\nwidth: ${no.such.key}\n",
    "data/toy": "name: toy\n",
    "planner/toy": "name: toy\n",
    "planner/toys/even": "name: toys\n",
    "planner/toys/odd": "name: toys\n",
}


def write_distribution(
    root: Path, name: str, package: str, plugin: str, options: Mapping[str, str]
) -> None:
    """Write an importable package, its config folder and its metadata below `root`."""
    (root / package / "conf").mkdir(parents=True)
    (root / package / "__init__.py").write_text("", encoding="utf-8")
    (root / package / "conf" / "__init__.py").write_text("", encoding="utf-8")
    (root / package / "plugin.py").write_text(plugin, encoding="utf-8")
    for option, text in options.items():
        path = root / package / "conf" / f"{option}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    info = root / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(f"[sbp]\n{name} = {package}.plugin\n", encoding="utf-8")


#: A launcher of Hydra that runs each job in a process of its own, as joblib's and submitit's do.
LAUNCHER = """
import os
from hydra._internal.core_plugins.basic_launcher import BasicLauncher

class Elsewhere(BasicLauncher):
    def launch(self, job_overrides, initial_job_idx):
        codes = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            child = os.fork()
            if not child:
                code = 1
                try:
                    super().launch([overrides], number)
                    code = 0
                finally:
                    os._exit(code)
            codes.append(os.waitpid(child, 0)[1])
        if any(codes):
            raise RuntimeError(f"a job has not produced any output: {codes}")
        return []
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a child process did."""

    code: int
    out: str
    err: str
    torch: bool
    folder: Path

    @property
    def made(self) -> list[str]:
        """Names of what it left in its working folder."""
        return sorted(path.name for path in self.folder.iterdir())


# Runs an app, and reports on the last line of stderr what only the process itself knows.
CHILD = """
import json, sys, traceback
from sbp_launch.apps.hydra_app import run
from sbp_launch.settings.check import check
from sbp_launch.settings.config import Application
from sbp_launch.apps.plan import check_plan

def task(config, registry, run_folder):
    config = getattr(config, "run", config)
    if {warn!r}:
        import logging
        logging.getLogger("a.library").info("it is busy")
        logging.getLogger("a.library").warning("it is odd")
        logging.getLogger("sbp_models.record_cache").info("making tokens: 3%")
    if {build!r}:
        registry.make({build!r}, getattr(config, {build!r}).name)
    if {fail!r} and (not {goes_on!r} or config.trainer.steps == 1):
        from sbp_core.errors import PlanError
        raise PlanError("it does not fit", where="rank 3")
    if {refuse!r}:
        from sbp_core.errors import ConfigError
        (run_folder / "environment.json").write_text("refused")
        if {refuse!r} == "late":
            (run_folder / "plan.txt").write_text("planned")
        raise ConfigError("it goes on in other data")
    if {stopped_by!r} and config.trainer.steps == 1:
        sys.exit(128 + {stopped_by!r})
    print(json.dumps({{
        "model": [config.model.name, dict(config.model.settings)],
        "planner": config.planner.name,
        "steps": config.trainer.steps,
        "mesh": config.mesh,
        "run_folder": str(run_folder),
    }}))

code = 0
try:
    app = Application(
        name="sbp-toy",
        about="be a toy",
        config_name={config!r},
        check=check_plan if {config!r} == "plan" else check,
        task=task,
        sweep_goes_on={goes_on!r},
        may_overwrite=(lambda config: config.trainer.overwrite) if {overwrites!r} else None,
    )
    code = run(app)
except SystemExit as exit:
    code = exit.code or 0
except Exception:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.write("\\n" + json.dumps([code, "torch" in sys.modules]))
"""


def group_of(override: str) -> str:
    name = override.partition("=")[0]
    return name if name in PLUGIN_GROUPS else f"{override} is no group"
