"""The memory of a plan: lifetimes, peaks, offsets in an arena, and what a run really takes.

In order: `layout` (knows torch) says how results lie, `lifetime` when they live, `report` what that
comes to, `offsets` where they go in one arena, `arena` (knows torch) makes the views there; `meter`
(knows torch) counts what a session holds while it runs. Importing the package does not import
torch; `predict` does.
"""

from __future__ import annotations

from sbp_core.compile.physical import PhysicalPlan
from sbp_core.memory.kinds import Kind
from sbp_core.memory.lifetime import lifetimes
from sbp_core.memory.report import MemoryReport, RankMemory, report

__all__ = ["Kind", "MemoryReport", "RankMemory", "predict"]


def predict(plan: PhysicalPlan, *, arena: bool = False) -> MemoryReport:
    """Return the exact memory of every rank of a plan: peaks, by kind and by module.

    Exact for what PyTorch's tensors hold; scratch memory inside operators is not counted. Needs
    torch.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
        arena: As with the setting `arena` of the actor runtime, where ranks are threads.

    Raises:
        PlanError: an operator does not run on fake tensors, so that its memory is not known.
    """
    from sbp_core.memory.arena import arenas
    from sbp_core.memory.layout import Layouts

    found = lifetimes(plan, Layouts(plan.steps))
    return report(found, arenas(plan, found, reads_at_once=True) if arena else None)
