"""Predict the memory of each rank of a plan; planning compares it with the memory limit.

Memory of tensors is exact: the peak over their lifetimes (`lifetime`). If ranks are processes, an
upper estimate of transport buffers is added to each run of a boxing actor (a collective, a send or
a receive), because a process packs values to send them. A sent value stays packed until it is
received; `lifetime` counts it as the shard. A receive that is started early needs memory from its
start on. Ranks that are threads pass shards by reference, without buffers.
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

    It caches answers: callers that predict several similar plans share one object.

    Raises:
        SbpLookupError: no tensor library is installed.
    """
    return cast(LayoutLibrary, tensor_library()).call_layouts()


def predict_memory(
    plan: PhysicalPlan, *, processes: bool = False, layouts: CallLayouts | None = None
) -> MemoryReport:
    """Return the exact memory of every rank of a plan: peaks, by kind and by module.

    Exact for the tensors of the tensor library; scratch memory inside operators is not counted.

    Args:
        plan: A plan with firing orders that `sbp_core.check` accepts.
        processes: Whether every rank is a process of its own. Then buffers of its transport count
            too, as communication buffers. This is an upper estimate, because contiguous pieces need
            less. Otherwise ranks are threads, which pass their values by reference.
        layouts: Computes the memory layout of results; a new `call_layouts` if omitted.

    Raises:
        PlanError: the layout of a result is not known, so that its memory is not.
        SbpLookupError: `layouts` is omitted and no tensor library is installed.
    """
    ranks: dict[int, RankMemory] = {}
    # One by one, because the lifetimes of one rank of a large plan take much memory.
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
    """Return, for each boxing actor of a rank, the approximate bytes of its buffers in a firing.

    Internal memory of libraries (gloo, MPI, NCCL) is not included: see `boxing.memory`.
    """
    found: dict[str, int] = {}
    collective: dict[int, dict[int, int]] = {}
    for actor in plan.by_rank[rank].actors:
        if not isinstance(actor, BoxingActor):
            continue
        step = plan.steps[actor.step]
        if isinstance(actor, Collective):
            # Bytes that a collective holds in addition to its input and output shards, by rank.
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
    """Yield the receives of a rank in a step that are started before their firings."""
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
    """Return the bytes that one end of a transfer packs for other ranks, or receives from them."""
    return sum(
        piece.size_bytes
        for piece in transfer_pieces(step)
        if piece.sender != piece.receiver and rank == (piece.sender if sends else piece.receiver)
    )
