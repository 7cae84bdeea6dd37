"""What `sbp-plan` says beside a plan: why it is so, how another one compares, and a page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from sbp_core.infer import PinValue
from sbp_launch.console import say
from sbp_launch.explaining.alternatives import Replan
from sbp_launch.explaining.compare import compare_lines
from sbp_launch.explaining.other_plan import read_strategy, strategy_of
from sbp_launch.explaining.question import Question
from sbp_launch.explaining.why import Asked, why_lines
from sbp_launch.planning.flow import Planned
from sbp_launch.trainer.other_plan import planned_as
from sbp_launch.trainer.trainer import PlannedOnly


def answer(found: PlannedOnly, *, why: str | None, compare: str | None) -> None:
    """Print the answers to what is asked of a plan.

    Args:
        found: The plan.
        why: What `why=` asks; None for nothing.
        compare: What `compare=` names; None for nothing.

    Raises:
        ConfigError: the question is about nothing of the model, or the other plan is not for it.
    """
    console, planned = found.run.console, found.planned
    if why is not None:
        asked = Asked(
            planned=planned,
            replan=_replanning(found),
            planning_s=found.planning_s,
            planner=planned.strategy.planner,
        )
        with console.status("") as status:
            lines = list(why_lines(Question.parse(why), asked, status.update))
        say(console, lines)
    if compare is not None:
        other = planned_as(read_strategy(strategy_of(compare)), found.planner, found.program)
        for line in compare_lines(planned, other, compare):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _replanning(found: PlannedOnly) -> Replan:
    """Return what plans the step again, without a word."""
    quiet = replace(found.planner, run=replace(found.run, console=Console(quiet=True)))

    def replan(pins: Mapping[str, PinValue]) -> Planned:
        return quiet.plan(pins)

    return replan


def draw_page(found: PlannedOnly, path: str) -> None:
    """Write the plan as one page."""
    from sbp_launch.explaining.plan_page import plan_page

    Path(path).write_text(plan_page(found.planned, found.run.config.model.name), encoding="utf-8")
    sys.stdout.write(f"wrote {path}\n")
