"""The exact memory of a plan, the one number that limits are compared with; transports' buffers.

Ranks that are threads hand shards over by reference, and their results are made where they stay; a
process packs what it sends and receives packed buffers (`sbp_torch.boxing.processes`). How large
these get follows from the step, so each firing of a boxing actor counts with its own; what was sent
stays packed until it is received, which `lifetime` counts as the shard itself. What is asked for
ahead of its firing has its memory from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from sbp_core.boxing.memory import step_memory_bytes
from sbp_core.boxing.slices import bounds_of, itemsize, transfer_pieces, volume
from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.actors import BoxingActor, Collective, Receive, Send
from sbp_core.compile.order import early_receives
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.memory.lifetime import each_lifetimes
from sbp_core.memory.reports import EarlyReceive, MemoryReport, RankMemory, report
from sbp_core.memory.storage_view import CallLayouts, LayoutLibrary
from sbp_core.plugins.tensor_library import tensor_library


def call_layouts() -> CallLayouts:
    """Return the object that asks the installed tensor library for the memory layout of results.

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
        layouts: Says how results are laid out in memory, as `call_layouts` does, which is learned
            anew if omitted.

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


def buffer_bytes(plan: PhysicalPlan, rank: int) -> dict[str, int]:
    """Return for each boxing actor of a rank the bytes of its buffers, roughly, in a firing.

    What libraries keep inside (gloo, MPI, NCCL) is not in it: see `boxing.memory`.
    """
    found: dict[str, int] = {}
    collective: dict[int, dict[int, int]] = {}
    for actor in plan.by_rank[rank].actors:
        if not isinstance(actor, BoxingActor):
            continue
        step = plan.steps[actor.step]
        if isinstance(actor, Collective):
            # What a collective holds besides the shards from before and after, by rank.
            if actor.step not in collective:
                size, ends = itemsize(step.dtype), (step.source, step.target)
                shards = [bounds_of(step.shape, *end) for end in ends]
                collective[actor.step] = {
                    r: held - sum(volume(bounds[r]) * size for bounds in shards if r in bounds)
                    for r, held in step_memory_bytes(step).items()
                }
            found[actor.name] = collective[actor.step][rank]
        else:
            found[actor.name] = _packed(step, rank, sends=isinstance(actor, Send))
    return found


def early_receive_bytes(plan: PhysicalPlan, rank: int) -> Iterator[EarlyReceive]:
    """Yield what a rank asks for before it receives it, in a step."""
    part = plan.by_rank[rank]
    for thread, order in part.orders.items():
        for place, receives in early_receives(part, thread).items():
            for receive in receives:
                actor = part.by_name[order[receive][0]]
                assert isinstance(actor, Receive), "only receives are early"
                step = plan.steps[actor.step]
                result = volume(bounds_of(step.shape, *step.target)[rank]) * itemsize(step.dtype)
                size_bytes = result + _packed(step, rank, sends=False)
                yield EarlyReceive(firings=order[place:receive], size_bytes=size_bytes)


def _packed(step: BoxingStep, rank: int, *, sends: bool) -> int:
    """Return what one end of a transfer packs for other ranks, or receives from them."""
    return sum(
        piece.size_bytes
        for piece in transfer_pieces(step)
        if piece.sender != piece.receiver and rank == (piece.sender if sends else piece.receiver)
    )
