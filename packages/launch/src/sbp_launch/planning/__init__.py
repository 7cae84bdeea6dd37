"""From a one-device step to a checked plan, and reports of plans for people.

`flow` is the way: capture, passes, planner, compiler, check, memory. Of a plan, `rows` has a row
for each module and op, `moves` the boxing around them, `table` prints both; `pipeline`, `savings`,
`utilization` and `report` say the rest; `output` writes all of it on a console and into a folder;
`source_lines` finds the model's line of an operator that failed. Knows no config of a run:
`sbp_launch.trainer` and `sbp_launch.parallel` both plan through this room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_launch.planning.family import StepFamily
    from sbp_launch.planning.flow import Captured, Planned, PlanSettings, capture_training, compiled

__all__ = ["Captured", "PlanSettings", "Planned", "StepFamily", "capture_training", "compiled"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Captured": "flow",
        "PlanSettings": "flow",
        "Planned": "flow",
        "StepFamily": "family",
        "capture_training": "flow",
        "compiled": "flow",
    },
)
