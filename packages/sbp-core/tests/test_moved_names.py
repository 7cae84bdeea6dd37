"""Names that have moved or are called otherwise work as before for a release, and say so."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

MOVED = [
    ("sbp_core.plugins.PlanRequest", "sbp_core.PlanRequest"),
    ("sbp_core.plugins.Planner", "sbp_core.planning.Planner"),
    ("sbp_core.plugins.Launcher", "sbp_core.processes.Launcher"),
    ("sbp_core.plugins.LaunchRequest", "sbp_core.processes.LaunchRequest"),
    ("sbp_core.plugins.Storage", "sbp_core.plugins.CheckpointStorage"),
    ("sbp_core.plugins.ChecksOthers", "sbp_core.plugins.ChecksCombination"),
    ("sbp_core.signatures.signatures", "sbp_core.signatures.legal_signatures"),
    ("sbp_core.pipeline.simulate", "sbp_core.pipeline.simulate_schedule"),
    ("sbp_core.check.CheckReport", "sbp_core.plan_check.CheckReport"),
    ("sbp_core.simulate.simulate", "sbp_core.simulation.simulate"),
    (
        "sbp_core.testing.cluster.ClusterConformance",
        "sbp_core.testing.cluster_suite.ClusterConformance",
    ),
]


def _found(dotted: str) -> object:
    room, _, name = dotted.rpartition(".")
    return getattr(import_module(room), name)


@pytest.mark.parametrize(("old", "new"), MOVED)
def test_a_name_that_has_moved_is_the_same_and_tells_its_address(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        found = _found(old)

    assert found is _found(new)


@pytest.mark.parametrize("room", ["sbp_core.plugins", "sbp_core.check", "sbp_core.pipeline"])
def test_a_name_that_never_was_there_is_an_attribute_error(room: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Planer'"):
        _found(f"{room}.Planer")


def test_importing_a_module_under_its_old_name_leaves_the_function_in_place() -> None:
    import sbp_core.check

    import sbp_core.plan_check

    assert inspect.isfunction(sbp_core.check)
    assert sbp_core.check is sbp_core.plan_check.check


def test_nothing_is_loaded_and_nothing_said_before_an_old_name_is_asked_for() -> None:
    script = "import sys, sbp_core; sys.exit('sbp_core.plan_check' in sys.modules)"

    assert (
        subprocess.run([sys.executable, "-W", "error", "-c", script], check=False).returncode == 0
    )
