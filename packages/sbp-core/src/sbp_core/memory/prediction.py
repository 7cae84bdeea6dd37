"""The exact memory of a plan: the one number that limits are compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from sbp_core.compile.physical import PhysicalPlan
from sbp_core.memory.communication_buffers import buffer_bytes, early_receive_bytes
from sbp_core.memory.layout_library import CallLayouts, LayoutLibrary
from sbp_core.memory.lifetime import each_lifetimes
from sbp_core.memory.report import MemoryReport, RankMemory, report
from sbp_core.plugins.tensor_library import tensor_library


def call_layouts() -> CallLayouts:
    """Return what learns from the installed tensor library how the results of calls lie.

    It remembers what it learned: whoever predicts several similar plans passes one to them all.

    Raises:
        SbpLookupError: no tensor library is installed.
    """
    return cast(LayoutLibrary, tensor_library()).call_layouts()


def predict_memory(
    plan: PhysicalPlan, *, processes: bool = False, layouts: CallLayouts | None = None
) -> MemoryReport:
    """Return the exact memory of every rank of a plan: peaks, by kind and by module.

    Exact for what the tensors of the tensor library hold; scratch memory inside operators is not
    counted.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
        processes: Whether every rank is a process of its own, so that what its transport packs and
            receives counts too, among the communication buffers: no longer exact, as it takes
            less where pieces lie well. Otherwise ranks are threads, which hand over what they have.
        layouts: Says how results lie in memory, as `call_layouts` does, which is learned anew if
            omitted.

    Raises:
        PlanError: the layout of a result is not known, so that its memory is not.
        SbpLookupError: `layouts` is omitted and no tensor library is installed.
    """
    ranks: dict[int, RankMemory] = {}
    # One after the other, as the lifetimes of one rank of a large plan take much memory.
    for one, alike in each_lifetimes(plan, layouts or call_layouts()):
        found = {rank: replace(one, rank=rank) for rank in alike}
        if not processes:
            ranks |= report(found).ranks
            continue
        buffers = {rank: buffer_bytes(plan, rank) for rank in alike}
        early = {rank: tuple(early_receive_bytes(plan, rank)) for rank in alike}
        ranks |= report(found, buffers, early).ranks
    return MemoryReport(ranks=dict(sorted(ranks.items())))
