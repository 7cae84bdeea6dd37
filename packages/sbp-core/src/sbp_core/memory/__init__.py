"""The memory of a plan: lifetimes, peaks, offsets in an arena, and what a run really takes.

In order: `layout` (knows torch) says how results lie, `lifetime` when they live, `buffers` what
transports between processes hold beside them, `report` what that comes to, `offsets` where results
go in one arena, `arena` (knows torch) makes the views there; `meter` (knows torch) counts what a
session holds while it runs. Importing the package does not import torch; `predict` does.
"""

from __future__ import annotations

from sbp_core.compile.physical import PhysicalPlan
from sbp_core.memory.communication_buffers import buffer_bytes
from sbp_core.memory.kinds import Kind
from sbp_core.memory.lifetime import lifetimes
from sbp_core.memory.report import MemoryReport, RankMemory, report

__all__ = ["Kind", "MemoryReport", "RankMemory", "predict"]


def predict(plan: PhysicalPlan, *, arena: bool = False, processes: bool = False) -> MemoryReport:
    """Return the exact memory of every rank of a plan: peaks, by kind and by module.

    Exact for what PyTorch's tensors hold; scratch memory inside operators is not counted. Needs
    torch.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
        arena: As with the setting `arena=true` of the actor runtime.
        processes: Whether every rank is a process of its own, so that what its transport packs and
            receives counts too, among the communication buffers: no longer exact, as it takes
            less where pieces lie well. Otherwise ranks are threads, which hand over what they have.

    Raises:
        PlanError: an operator does not run on fake tensors, so that its memory is not known.
    """
    from sbp_core.memory.arena import arenas
    from sbp_torch.memory.layout import Layouts

    found = lifetimes(plan, Layouts(plan.steps))
    slots = arenas(plan, found, reads_at_once=not processes) if arena else None
    buffers = {rank: buffer_bytes(plan, rank) for rank in found} if processes else None
    return report(found, slots, buffers)
