"""From a one-device step to a checked plan, and readable reports of plans.

`flow` has the steps: capture, passes, planner, compiler, check, memory. `rows` makes a row of each
module and op of a plan, `moves` finds the boxing around them, and `table` prints both; `pipeline`,
`savings`, `utilization` and `report` make the other lines; `output` writes everything to a console
and into a folder; `source_lines` finds the model's line of a failed operator. This room does not
read the config of a run: `sbp_launch.trainer` and `sbp_launch.parallel` both plan through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_launch.planning.family import StepFamily
    from sbp_launch.planning.flow import Captured, Planned, PlanSettings, capture_training, compiled

__all__ = ["Captured", "PlanSettings", "Planned", "StepFamily", "capture_training", "compiled"]

__getattr__, __dir__ = lazy_room(
    __name__, family="StepFamily", flow="Captured PlanSettings Planned capture_training compiled"
)
