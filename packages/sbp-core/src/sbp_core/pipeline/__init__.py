"""Pipelines in the abstract: p ranks, v chunks of the model a rank, m micro-batches a step.

A schedule says which rank does what in which order; the compiler derives the rest. In the order of
use: `schedule` (the values), `policies` (the rules that are known by name, and what they ask for),
`schedule_times` (what waits for what, and how long: a schedule in time), `automatic` (from a name
to a schedule, and one that is searched for). What a stage computes is known to nobody here.
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
