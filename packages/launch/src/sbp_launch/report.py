"""What is said of a plan beside its table: what it is and moves, what each rank's memory holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sbp_core.check import CheckReport
from sbp_core.compile import BoxingActor, PhysicalPlan
from sbp_core.infer import step_time_s
from sbp_core.memory import MemoryReport
from sbp_core.placement import Placement
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.rows import Row, ranks_text

#: Parts of a rank's memory below this share of its peak are summed up.
_LEAST_SHARE = 0.01


def memory_lines(plan: PhysicalPlan, memory: MemoryReport | str) -> list[str]:
    """Return for each stage what the rank holds at its peak that needs most.

    Args:
        plan: Whose memory it is.
        memory: Of each rank, or why it is not known.
    """
    if isinstance(memory, str):
        return [f"memory is not known, so no limit was checked: {memory}"]
    found = memory.ranks
    lines = []
    for index, stage in enumerate(plan.stages):
        worst = max((found[rank] for rank in stage.rank_list), key=lambda rank: rank.peak)
        kinds = sorted(worst.kinds.items(), key=lambda entry: -entry[1])
        parts = [(kind.value, n) for kind, n in kinds if n >= _LEAST_SHARE * worst.peak]
        if rest := worst.peak - sum(size for _, size in parts):
            parts.append(("other", rest))
        text = " + ".join(f"{format_bytes(size)} {name}" for name, size in parts)
        of = f"a rank of stage {index}" if len(plan.stages) > 1 else "a rank"
        lines.append(f"memory of {of} at its peak: {format_bytes(worst.peak)}")
        lines.append(f"  = {text}")
    return lines


def counted(number: int, word: str, plural: str = "s") -> str:
    """Return a number with its word: `1 step`, `3 steps`."""
    return f"{number} {word}{plural * (number != 1)}"


def summary(
    plan: PhysicalPlan, strategy: Strategy, checked: CheckReport, rows: Sequence[Row]
) -> list[str]:
    """Return the lines under the table: what the plan is and moves, and the planner's why.

    The latter is `explanation` of the strategy's report: a list of lines. The plan may have fewer
    boxing steps than its rows, as small gradients travel together.
    """
    actors = sum(len(part.actors) for part in plan.ranks)
    kinds = Counter(
        plan.steps[index].kind.value
        for index in {a.step for p in plan.ranks for a in p.actors if isinstance(a, BoxingActor)}
    )
    if len(plan.stages) > 1:
        meshes = "; ".join(map(_stage_text, plan.stages))
    else:
        meshes = _mesh_text(plan.stages[0])
    steps = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
    unmerged = sum(row.num_steps for row in rows)
    if unmerged > kinds.total():
        steps += f", merged from {unmerged}"
    lines = [
        f"planner {strategy.planner}: {counted(len(plan.ranks), 'rank')}, "
        f"{counted(len(plan.stages), 'stage')} ({meshes}), "
        f"{counted(plan.num_micro_batches, 'micro-batch', 'es')}",
        f"boxing in a step: {steps}; {format_bytes(plan.boxing_bytes)} between ranks",
        f"{actors} actors, {checked.num_firings} firings a step; proved live and bounded",
        f"predicted time of a step: {format_seconds(step_time_s(plan))}",
    ]
    return [*lines, *strategy.report.get("explanation", ())]


def _stage_text(placement: Placement) -> str:
    mesh = f": {_mesh_text(placement)}" if placement.size > 1 else ""
    return ranks_text(placement) + mesh


def _mesh_text(placement: Placement) -> str:
    pairs = zip(placement.axes, placement.mesh_shape, strict=True)
    return " x ".join(f"{axis} {size}" for axis, size in pairs)
