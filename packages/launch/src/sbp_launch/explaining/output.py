"""Print a plan on a console, and write its files (`strategy.yaml`, `plan.txt`, ...) to a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from sbp_core import strategy_yaml
from sbp_core.compile import PLAN
from sbp_core.memory import MemoryReport
from sbp_launch.console import say
from sbp_launch.explaining.report import memory_lines, summary
from sbp_launch.explaining.savings import saving_lines
from sbp_launch.explaining.table import legend, plan_table
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.rows import plan_text
from sbp_launch.planning.utilization import speed_line


def print_plan(
    console: Console, planned: Planned, mesh: Mapping[str, int], max_rows: int, todo: str
) -> None:
    """Print a plan: its table and its summary.

    Args:
        console: The console to print on.
        planned: The plan.
        mesh: Number of ranks along each axis of the whole mesh, by the name of the axis.
        max_rows: The largest number of rows of the table; 0 for no table.
        todo: How to see the omitted rows.
    """
    if max_rows:
        rows, stages = planned.module_rows, planned.strategy.stages
        console.print(plan_table(rows, stages, max_rows, console.width, todo))
        say(console, legend(rows, mesh, stages))
    plan, graph, strategy = planned.plan, planned.graph, planned.strategy
    rows, num_steps = planned.module_rows, planned.num_steps
    checked, step_s = planned.checked, planned.simulation.step_s
    speed = speed_line(graph, planned.settings.cluster, len(plan.ranks), step_s) if step_s else ""
    say(console, summary(plan, graph, strategy, rows, num_steps, checked, step_s, speed))
    say(console, planned.proof.lines() if planned.proof else [])
    say(console, saving_lines(graph, strategy))
    say(console, memory_lines(plan, planned.memory))


def write_plan(folder: Path, planned: Planned) -> None:
    """Write the plan, the strategy and the memory into a folder.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planned.strategy.save(folder / "strategy.json")
    strategy_yaml.save(planned.strategy, folder / "strategy.yaml")
    if isinstance(planned.memory, MemoryReport):
        text = "\n".join(planned.memory.lines()) + "\n"
        (folder / "memory.txt").write_text(text, encoding="utf-8")
    text = json.dumps(PLAN.dump(planned.plan))
    (folder / "plan.json").write_text(text, encoding="utf-8")
    (folder / "plan.txt").write_text(plan_text(planned.op_rows), encoding="utf-8")
