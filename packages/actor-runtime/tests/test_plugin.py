import subprocess
import sys
from importlib.metadata import entry_points

from sbp_actor_runtime import plugin
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_core.plugins import API_VERSION, discover


def test_the_entry_point_leads_to_the_hooks() -> None:
    (entry,) = (entry for entry in entry_points(group="sbp") if entry.name == "sbp-actor-runtime")

    assert entry.load() is plugin
    assert plugin.SBP_API_VERSION == API_VERSION


def test_the_runtime_is_made_from_its_settings() -> None:
    runtime = discover().make("runtime", "actor", {"deadline_s": 7.0})

    assert isinstance(runtime, ActorRuntime)
    assert runtime.config.deadline_s == 7.0


def test_the_hook_module_imports_no_torch() -> None:
    code = "import sys, sbp_actor_runtime.plugin; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
