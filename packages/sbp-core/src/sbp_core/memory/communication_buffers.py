"""What a transport between processes holds beside the shards while a step runs.

Ranks that are threads hand shards over by reference, and their results are made where they stay; a
process packs what it sends and receives packed buffers (`boxing.processes`). How large these get
follows from the step, so each firing of a boxing actor counts with its own; what was sent stays
packed until it is received, which `lifetime` counts as the shard itself.
"""

from __future__ import annotations

from sbp_core.boxing.memory import step_memory_bytes
from sbp_core.boxing.slices import bounds_of, itemsize, transfer_pieces, volume
from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.physical import BoxingActor, Collective, PhysicalPlan, Send


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
