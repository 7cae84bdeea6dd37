"""Describe the pipeline of a plan in lines of its report: stages, schedule, waiting of the ranks.

    time ->                                one rank a row, F and B of micro-batches 0 to 3
    stage 0   F0 F1 .. .. B0 F2 B1 F3 B2 .. B3        .. waits: the bubble
    stage 1   .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

With p stages of equal duration and m micro-batches, a rank waits in (p - 1) of the m + p - 1 slots
of forward and backward. The printed prediction also uses the times of stages and of boxing.

Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3 (the share); Narayanan et al., "PipeDream",
SOSP 2019 (1F1B).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sbp_core.compile import Accumulate, Compute, PhysicalPlan, RankPlan
from sbp_core.infer import one_forward_one_backward
from sbp_core.placement import Placement
from sbp_core.strategy import Strategy
from sbp_launch.explaining.table import Group, groups_of
from sbp_launch.planning.moves import ranks_text
from sbp_launch.planning.rows import ModuleRow

_NAMES = {"pipedream": "PipeDream", "2bw": "2BW"}

#: The largest number of modules that are named for a stage.
_MOST_NAMES = 4


def pipeline_lines(
    plan: PhysicalPlan, strategy: Strategy, rows: Sequence[ModuleRow], step_s: float
) -> list[str]:
    """Return schedule, stages and bubble; nothing for a plan of one stage.

    Args:
        plan: The plan.
        strategy: The strategy from which it was compiled.
        rows: The rows of its table.
        step_s: The predicted time of a step, in seconds.
    """
    count, micro_batches = len(plan.stages), plan.num_micro_batches
    if count == 1:
        return []
    busy, groups = [_busy_s(plan, stage) / step_s for stage in plan.stages], groups_of(rows)
    batches = f"{micro_batches} micro-batch" + "es" * (micro_batches != 1)
    lines = [f"pipeline: {count} stages, {batches}, schedule {_schedule(plan, strategy)}"]
    for index, stage in enumerate(plan.stages):
        lines.append(
            f"  stage {index} ({ranks_text(stage)}): {_modules(groups, index)}; "
            f"busy {busy[index]:.0%}, {strategy.in_flight[index]} in flight"
            f"{_stale(strategy, index)}"
        )
    equal = (count - 1) / (micro_batches + count - 1)
    sizes = [stage.size for stage in plan.stages]
    idle = 1 - sum(b * size for b, size in zip(busy, sizes, strict=True)) / sum(sizes)
    bubble = f"  bubble: ranks wait {idle:.0%} of the predicted step"
    if not strategy.orders:
        bubble += f"; (p - 1)/(m + p - 1) = {equal:.0%} if stages were equal"
    if micro_batches == 1:
        bubble += "; raise trainer.micro_batches, so that stages work at the same time"
    return [*lines, bubble]


def _schedule(plan: PhysicalPlan, strategy: Strategy) -> str:
    """Return the name of the schedule that the quotas give; if it has none, list the quotas."""
    stages, micro_batches = len(strategy.stages), strategy.num_micro_batches
    if strategy.orders:
        return str(strategy.report.get("pipeline", "of its own order"))
    if strategy.staleness:
        name = _NAMES.get(str(strategy.report.get("pipeline")), "with stale parameters")
        each = plan.num_micro_batches // plan.num_updates
        return f"{name}, an update after " + (
            "each micro-batch" if each == 1 else f"every {each} micro-batches"
        )
    if micro_batches == 1:
        return "one after the other"
    if strategy.in_flight == one_forward_one_backward(stages, micro_batches):
        return "1F1B"
    if set(strategy.in_flight) == {micro_batches}:
        return "GPipe"
    return f"with in_flight {list(strategy.in_flight)}"


def _stale(strategy: Strategy, stage: int) -> str:
    updates = strategy.staleness[stage] if strategy.staleness else 0
    return f", parameters up to {updates} update{'s' * (updates > 1)} old" if updates else ""


def _busy_s(plan: PhysicalPlan, stage: Placement) -> float:
    """Return the mean over a stage's ranks of the seconds of a step in which a rank computes."""
    alike: Counter[int] = Counter()  # ranks share their actors
    first: dict[int, RankPlan] = {}
    for rank in stage.rank_list:
        part = plan.by_rank[rank]
        alike[id(part.actors)] += 1
        first.setdefault(id(part.actors), part)
    total = sum(
        alike[number] * actor.time_s * actor.num_firings(plan.repetitions)
        for number, part in first.items()
        for actor in part.actors
        if isinstance(actor, Compute | Accumulate)
    )
    return total / stage.size


def _modules(groups: Sequence[Group], stage: int) -> str:
    """Return the modules of a stage; if there are many, the middle ones are omitted."""
    names = [
        group.name.partition(" ")[0] or group.rows[0].module
        for group in groups
        if group.stage == stage and (group.name or not group.rows[0].is_parent)
    ]
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 2], "...", names[-1]]
    return ", ".join(names) or "operators of no module"
