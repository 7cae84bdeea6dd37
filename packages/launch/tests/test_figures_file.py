"""What a plan costs as JSON, and its simulated step as a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_rows import found_plan

from sbp_core.errors import ConfigError
from sbp_core.memory import MemoryReport
from sbp_launch.apps.answers import write_figures, write_trace
from sbp_launch.apps.plan import PlanConfig
from sbp_launch.explaining.plan_figures import figures_json, figures_of


@pytest.mark.parametrize("name", ["replicated", "sharded", "pipeline of meshes"])
def test_the_file_has_what_is_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = found_plan(name)
    path, figures = tmp_path / "plan.json", figures_of(planned)

    write_figures(planned, str(path))

    assert capsys.readouterr().out == f"wrote {path}\n"
    found = json.loads(path.read_text("utf-8"))
    assert found["step_s"] == planned.simulation.step_s
    assert found["sent_bytes"] == planned.plan.boxing_bytes
    assert sum(one["sent_bytes"] for one in found["traffic"]) <= found["sent_bytes"]
    assert 0 < found["mfu"] < 1
    assert found["num_parameters"] == sum(row.num_parameters for row in planned.module_rows)
    assert sorted(rank for stage in found["stages"] for rank in stage["ranks"]) == [
        part.rank for part in planned.plan.ranks
    ]
    ranks = found["memory"]["ranks"]
    assert figures.fullest is not None
    assert max(rank["peak_bytes"] for rank in ranks.values()) == figures.fullest.peak
    assert all(sum(rank["kinds"].values()) == rank["peak_bytes"] for rank in ranks.values())


def test_bound_and_gap_are_the_planners_and_null_without() -> None:
    planned = found_plan("replicated")
    proved = replace(planned.strategy, report={"bound_s": 2, "gap": 0.25})

    with_bound = figures_json(replace(planned, strategy=proved))
    without = figures_json(planned)

    assert (with_bound["bound_s"], with_bound["gap"]) == (2.0, 0.25)
    assert (without["bound_s"], without["gap"]) == (None, None)


def test_memory_that_is_not_known_says_why() -> None:
    planned = found_plan("replicated")
    planned.__dict__["memory"] = "no tensor library"
    try:
        memory = figures_json(planned)["memory"]
    finally:
        del planned.__dict__["memory"]

    assert memory == {
        "limit_bytes": planned.settings.cluster.device.memory_bytes,
        "ranks": None,
        "unknown": "no tensor library",
    }
    assert isinstance(planned.memory, MemoryReport)


def test_the_simulated_step_is_a_trace_of_all_ranks_that_ends_with_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = found_plan("pipeline of meshes")
    path = tmp_path / "step.json"

    write_trace(planned, str(path))

    assert capsys.readouterr().out.startswith(f"wrote {path}, for https://ui.perfetto.dev")
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {part.rank for part in planned.plan.ranks}
    end_us = max(event["ts"] + event["dur"] for event in slices)
    assert end_us == pytest.approx(1e6 * planned.simulation.step_s, abs=0.01)


@pytest.mark.parametrize("key", ["trace", "figures"])
def test_a_file_that_is_no_json_is_refused_before_anything_is_planned(
    key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.*does not end in .json"):
        PlanConfig(**{key: str(tmp_path / "step.txt")})
