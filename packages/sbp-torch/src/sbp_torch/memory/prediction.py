"""The exact memory of a plan: lifetimes of storages whose layouts PyTorch tells."""

from __future__ import annotations

from sbp_core.compile import PhysicalPlan
from sbp_core.memory import MemoryReport, buffer_bytes, lifetimes, report
from sbp_torch.memory.layout import Layouts


def predict(plan: PhysicalPlan, *, processes: bool = False) -> MemoryReport:
    """Return the exact memory of every rank of a plan: peaks, by kind and by module.

    Exact for what PyTorch's tensors hold; scratch memory inside operators is not counted.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
        processes: Whether every rank is a process of its own, so that what its transport packs and
            receives counts too, among the communication buffers: no longer exact, as it takes
            less where pieces lie well. Otherwise ranks are threads, which hand over what they have.

    Raises:
        PlanError: an operator does not run on fake tensors, so that its memory is not known.
    """
    found = lifetimes(plan, Layouts(plan.steps))
    buffers = {rank: buffer_bytes(plan, rank) for rank in found} if processes else None
    return report(found, buffers)
