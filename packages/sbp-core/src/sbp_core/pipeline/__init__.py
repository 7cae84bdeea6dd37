"""Pipelines in the abstract: p ranks, v chunks of the model a rank, m micro-batches a step.

A schedule says which rank does what in which order; the compiler derives the rest. In the order of
use: `action`, `schedule` (the values), `alternation` and `v_shape` (the rules that are known by
name), `policies` (their names, and what they ask for), `times`, `precedence` and `period` (what
waits for what, and how long), `simulate` (a schedule in time), `automatic` with `list_scheduling`
and `local_search` (one that is searched for), `choose` (from a name to a schedule). What a stage
computes is known to nobody here.

Stability: provisional.
"""

from __future__ import annotations

from sbp_core.pipeline.action import Action, ActionKind
from sbp_core.pipeline.choose import SCHEDULES, pipeline_schedule
from sbp_core.pipeline.schedule import PipelineSchedule
from sbp_core.pipeline.simulate import SimulatedSchedule, TimedAction, simulate
from sbp_core.pipeline.times import StageTimes

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "PipelineSchedule",
    "SimulatedSchedule",
    "StageTimes",
    "TimedAction",
    "pipeline_schedule",
    "simulate",
]
