"""What a transport between processes holds beside the shards while a step runs.

Ranks that are threads hand shards over by reference, and their results are made where they stay; a
process packs what it sends and receives packed buffers (`sbp_torch.boxing.processes`). How large
these get follows from the step, so each firing of a boxing actor counts with its own; what was sent
stays packed until it is received, which `lifetime` counts as the shard itself. What is asked for
ahead of its firing (`compile.early_receives`) has its memory from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sbp_core.boxing.memory import step_memory_bytes
from sbp_core.boxing.slices import bounds_of, itemsize, transfer_pieces, volume
from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.actors import BoxingActor, Collective, Receive, Send
from sbp_core.compile.early_receives import early_receives
from sbp_core.compile.physical import PhysicalPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyReceive:
    """What is held for a message that was asked for, until it is received.

    Args:
        firings: Of its thread, meanwhile: actor, index.
        size_bytes: That it holds.
    """

    firings: tuple[tuple[str, int], ...]
    size_bytes: int


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
            if actor.step not in collective:
                collective[actor.step] = _beside_shards(step)
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


def _beside_shards(step: BoxingStep) -> dict[int, int]:
    """Return by rank what a collective holds beside the shards from before and after."""
    shards = [bounds_of(step.shape, *side) for side in (step.source, step.target)]
    size = itemsize(step.dtype)
    return {
        rank: held - sum(volume(bounds[rank]) * size for bounds in shards if rank in bounds)
        for rank, held in step_memory_bytes(step).items()
    }


def _packed(step: BoxingStep, rank: int, *, sends: bool) -> int:
    """Return what one end of a transfer packs for other ranks, or receives from them."""
    return sum(
        piece.size_bytes
        for piece in transfer_pieces(step)
        if piece.sender != piece.receiver and rank == (piece.sender if sends else piece.receiver)
    )
