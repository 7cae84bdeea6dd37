"""Draw the simulated step of a plan (`sbp-plan timeline=`): in the terminal, as SVG, as a page."""

from __future__ import annotations

from sbp_launch.console import make_console
from sbp_launch.explaining.plan_timeline import coarse, plan_timeline, timeline_facts
from sbp_launch.explaining.timelines import show, write_drawings
from sbp_launch.planning.flow import Planned

#: The largest number of lanes in the terminal, and of bars in each lane.
_LANES, _BARS_A_LANE = 16, 120


def draw_plan(planned: Planned, out: str) -> None:
    """Draw the simulated step of a plan.

    Args:
        planned: The plan.
        out: The path of the drawings, without suffix.
    """
    plan = planned.plan
    timeline = plan_timeline(plan, planned.simulation, f"a step of {plan.planner}, simulated")
    lanes = min(_LANES, len(timeline.lanes))
    few, said = coarse(timeline, lanes * _BARS_A_LANE, lanes)
    console = make_console()
    show(few, console)
    for line in said:
        console.print(f"here, {line}")
    drawn, said = coarse(timeline)
    facts = timeline_facts(planned)
    write_drawings(drawn, {**facts, "drawn": "; ".join(said)} if said else facts, out)
