"""`trainer.micro_batches=auto`: the fewest parts of a step with which every rank fits its memory.

A planner that chooses among the variants of a step (`chooses_variants`) is left to choose it. For
others, each number that divides the batch is planned, the smallest first, until the exact memory of
the compiled plan fits: fewer and larger micro-batches keep the ranks busier. A pipeline wants more
of them than memory asks for, and is told the number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sbp_core.errors import ConfigError, PlanError, SbpError
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.report import counted
from sbp_launch.run.run import Run


def plan_fitting(run: Run, plan: Callable[[Run], Planned]) -> tuple[Run, Planned]:
    """Plan a run, with as many micro-batches as it says or needs.

    Args:
        run: The run; its number of micro-batches may be `auto`.
        plan: Plans a run whose number is known.

    Returns:
        The run with the number, and its plan.

    Raises:
        ConfigError: no number of micro-batches makes it fit.
        SbpError: of `plan`, about something else.
    """
    trainer = run.config.trainer
    if trainer.micro_batches != "auto":
        return run, plan(run)
    if getattr(run.make("planner"), "chooses_variants", False):
        return _chosen(run, plan)
    problem: SbpError | None = None
    counts = [n for n in range(1, trainer.batch_size + 1) if trainer.batch_size % n == 0]
    for count in counts:
        config = replace(run.config, trainer=replace(trainer, micro_batches=count))
        known = replace(run, config=config)
        try:
            planned = plan(known)
        except (ConfigError, PlanError) as error:
            if not _is_of_memory(error):
                raise
            problem = error
            batches = counted(count, "micro-batch", "es")
            run.say([f"micro_batches=auto: {batches} would not fit: {error.what}"])
            continue
        each = counted(config.trainer.micro_batch_size, "sample")
        run.say([f"micro_batches=auto: {count}, of {each}"])
        return known, planned
    assert problem is not None, "every batch has a divisor"
    raise problem.replaced(
        ConfigError,
        what=f"trainer.micro_batches=auto: not even {counts[-1]} micro-batches make the step fit: "
        f"{problem.what}",
        todo=problem.todo.replace("set trainer.micro_batches, ", ""),  # that has been tried
    ) from problem


def _chosen(run: Run, plan: Callable[[Run], Planned]) -> tuple[Run, Planned]:
    """Plan with a planner that chooses the number of micro-batches itself."""
    trainer = run.config.trainer
    config = replace(run.config, trainer=replace(trainer, micro_batches=1))
    planned = plan(replace(run, config=config, chooses_micro_batches=True))
    count = planned.strategy.num_micro_batches
    config = replace(run.config, trainer=replace(trainer, micro_batches=count))
    each = counted(config.trainer.micro_batch_size, "sample")
    run.say([f"micro_batches=auto: the planner has chosen {count}, of {each}"])
    return replace(run, config=config), planned


def _is_of_memory(error: SbpError) -> bool:
    """Whether a plan was refused for the memory that it needs."""
    told = " ".join((*error.where, error.accepted))
    return "memory_bytes" in told
