"""Pipeline schedules in the abstract: p ranks, v model chunks a rank, m micro-batches a step.

A schedule is the order of actions (forward, backward, ...) on each rank; the compiler derives the
rest of a plan from it. In the order of use: `schedule` (the data), `policies` (the named schedules,
such as 1F1B, and their requirements), `schedule_times` (dependencies and durations: a schedule in
time), `automatic` (from a name to a schedule, or a search for one). Stages are opaque here.
"""

from __future__ import annotations

from sbp_core.exports import moved_names
from sbp_core.pipeline.automatic import SCHEDULES, pipeline_schedule
from sbp_core.pipeline.schedule import Action, ActionKind, PipelineSchedule
from sbp_core.pipeline.schedule_times import (
    SimulatedSchedule,
    StageTimes,
    TimedAction,
    simulate_schedule,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "PipelineSchedule",
    "SimulatedSchedule",
    "StageTimes",
    "TimedAction",
    "pipeline_schedule",
    "simulate_schedule",
]

__getattr__ = moved_names(__name__, {"simulate": "sbp_core.pipeline.simulate_schedule"})
