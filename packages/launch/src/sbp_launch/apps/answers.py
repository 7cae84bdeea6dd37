"""Answers of `sbp-plan` to `explain=` and `compare=`; files of `page=`, `trace=` and others."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from sbp_core.compile.rank_calls import RANK_CALLS, rank_calls
from sbp_launch.console import say
from sbp_launch.explaining.alternatives import ExplainRequest, explain_lines
from sbp_launch.explaining.compare import compare_lines
from sbp_launch.explaining.plan_figures import figures_json
from sbp_launch.explaining.plan_page import plan_page
from sbp_launch.explaining.question import Question, read_strategy, strategy_of
from sbp_launch.planning.flow import Planned
from sbp_launch.run.run import Run
from sbp_launch.step.engine import quietly
from sbp_launch.step.step_planner import StepPlanner
from sbp_launch.tracing.events import Traced, trace_json
from sbp_launch.trainer.other_plan import planned_as
from sbp_launch.trainer.run_program import RunProgram


def answer_explain(
    question: str, planned: Planned, planner: StepPlanner, planning_s: float, console: Console
) -> None:
    """Print why some tensors have their SBPs, by comparing plans with other SBPs.

    Raises:
        ConfigError: the question matches nothing in the model.
    """
    quiet = replace(planner, stage=quietly, say=lambda lines: None)
    asked = ExplainRequest(planned=planned, replan=quiet.plan, planning_s=planning_s)
    with console.status("") as status:
        lines = list(explain_lines(Question.parse(question), asked, status.update))
    say(console, lines)


def answer_compare(
    place: str, planned: Planned, planner: StepPlanner, run: Run, program: RunProgram
) -> Planned:
    """Print a comparison with another plan, and return that plan.

    Raises:
        ConfigError: the other plan is not a plan of this model.
    """
    console = run.console
    with console.status("planning as it says"):
        other = planned_as(read_strategy(strategy_of(place)), planner, run, program)
    for line in compare_lines(planned, other, place):
        console.print(line, soft_wrap=True)
    return other


def list_calls(planned: Planned, planner: StepPlanner, path: str) -> None:
    """Write the operator calls that ranks may make under any plan, and print a message."""
    whole = planner.captured.whole
    forms = [planned.graph, planner.captured.graph, *([] if whole is None else [whole])]
    meshes = {mesh.mesh_shape: mesh for mesh in (planner.settings.mesh, *planned.strategy.stages)}
    found = rank_calls(forms, list(meshes.values()), planner.settings.cluster.device)
    RANK_CALLS.write(found, Path(path))
    sys.stdout.write(
        f"wrote {path}: {len(found.calls)} calls of operators on a rank; measure them on the "
        "machine of a cluster file, then plan with it\n"
        f"  sbp-calibrate ops={path} out=CLUSTER_FILE\n"
    )


def draw_page(
    planned: Planned, model: str, path: str, other: tuple[str, Planned] | None = None
) -> None:
    """Write a plan as an HTML page, and print a message."""
    Path(path).write_text(plan_page(planned, model, other), encoding="utf-8")
    sys.stdout.write(f"wrote {path}\n")


def write_trace(planned: Planned, path: str) -> None:
    """Write the simulated step of a plan as a trace, and print which viewers open it."""
    traced = Traced(plan=planned.plan, graph=planned.graph, spans=(), simulation=planned.simulation)
    Path(path).write_text(json.dumps(trace_json(traced)), encoding="utf-8")
    sys.stdout.write(f"wrote {path}, for https://ui.perfetto.dev or chrome://tracing\n")


def write_figures(planned: Planned, path: str) -> None:
    """Write the predicted costs of a plan as JSON, and print a message."""
    text = json.dumps(figures_json(planned), indent=2)
    Path(path).write_text(f"{text}\n", encoding="utf-8")
    sys.stdout.write(f"wrote {path}\n")
