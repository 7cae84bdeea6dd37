"""From the name of a schedule to the schedule.

Stability: internal.
"""

from __future__ import annotations

from sbp_core.errors import ConfigError, unknown_name
from sbp_core.pipeline.policies import POLICIES, named_schedule
from sbp_core.pipeline.schedule import PipelineSchedule

SCHEDULES: tuple[str, ...] = tuple(POLICIES)
"""The names that `pipeline_schedule` knows."""


def pipeline_schedule(
    name: str, num_ranks: int, num_micro_batches: int, *, num_chunks: int | None = None
) -> PipelineSchedule:
    """Return the schedule of a name, for one step.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: Ranks of the pipeline, at least 1.
        num_micro_batches: Micro-batches of a step, at least 1.
        num_chunks: Stages a rank, at least 1; by default 2 where the name stands for several, else
            1.

    Raises:
        ConfigError: No schedule is called so, or this one is not defined for these numbers.

    >>> [str(action) for action in pipeline_schedule("1f1b", 2, 2).orders[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    if name not in SCHEDULES:
        unknown = unknown_name("schedule of a pipeline", name, SCHEDULES)
        raise ConfigError(unknown.what, accepted=unknown.accepted, todo=unknown.todo)
    numbers = {"ranks": num_ranks, "micro-batches": num_micro_batches, "chunks a rank": num_chunks}
    for what, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(
                f"a pipeline of {number} {what}", accepted="1, 2, 3, ...", todo=f"take more {what}"
            )
    return named_schedule(name, num_ranks, num_micro_batches, num_chunks)
