"""From the name of a schedule to the schedule.

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from sbp_core.errors import ConfigError, unknown_name
from sbp_core.pipeline.automatic import AutomaticSearch
from sbp_core.pipeline.policies import POLICIES, named_schedule
from sbp_core.pipeline.schedule import PipelineSchedule
from sbp_core.pipeline.times import Duration, duration, stage_times

AUTO = "auto"
SCHEDULES: tuple[str, ...] = (*POLICIES, AUTO)
"""The names that `pipeline_schedule` knows."""


def pipeline_schedule(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    num_chunks: int | None = None,
    times: Sequence[object] | None = None,
    transfer: Duration = 0,
    memory: Duration | None = None,
) -> PipelineSchedule:
    """Return the schedule of a name, for one step.

    Args:
        name: One of `SCHEDULES`. `auto` searches for the shortest, and among those as short for
            the one with the fewest activations alive.
        num_ranks: Ranks of the pipeline, at least 1.
        num_micro_batches: Micro-batches of a step, at least 1.
        num_chunks: Stages a rank, at least 1; by default 2 where the name stands for several, else
            1; `auto` tries both.
        times: `[F, I, W]` of one rank's part, or one such list for each rank, for `auto`; by
            default all three are equal.
        transfer: The time from a stage to the next one on another rank, for `auto`.
        memory: The most activations alive on a rank, in those of its whole part; by default any.

    Raises:
        ConfigError: No schedule is called so, this one is not defined for these numbers, or it
            needs more memory.

    >>> [str(action) for action in pipeline_schedule("1f1b", 2, 2).orders[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    if name not in SCHEDULES:
        unknown = unknown_name("schedule of a pipeline", name, SCHEDULES)
        raise unknown.replaced(ConfigError)
    numbers = {"ranks": num_ranks, "micro-batches": num_micro_batches, "chunks a rank": num_chunks}
    for what, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(
                f"a pipeline of {number} {what}", accepted="1, 2, 3, ...", todo=f"take more {what}"
            )
    limit = None if memory is None else duration(memory, "memory")
    if name != AUTO:
        schedule = named_schedule(name, num_ranks, num_micro_batches, num_chunks)
        _check_memory(schedule, limit)
        return schedule
    return AutomaticSearch(
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        times=stage_times(times or [1, 1, 1], num_ranks),
        transfer=duration(transfer, "transfer"),
        memory=limit,
    ).run()


def _check_memory(schedule: PipelineSchedule, memory: Fraction | None) -> None:
    live = max(schedule.live(rank) for rank in range(schedule.num_ranks))
    if memory is not None and live > memory:
        raise ConfigError(
            f"the schedule {schedule.name!r} keeps up to {float(live):g} activations alive on a "
            f"rank, and {float(memory):g} are allowed",
            accepted=f"memory of at least {float(live):g} for it",
            todo="allow more, or take 'auto', which keeps to it",
        )
