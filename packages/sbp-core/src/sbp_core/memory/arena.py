"""The arena of a rank: one block of memory, and the views that segments write. Knows torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from sbp_core.compile.physical import ActorKind, PhysicalPlan
from sbp_core.graph.ir import ITEMSIZE
from sbp_core.memory.lifetime import RankLifetimes, lifetimes
from sbp_core.memory.slots import OutVariant, RankSlots, Slot, rank_slots
from sbp_torch._torch_compat import (
    OpOverload,
    argument_types,
    has_cpu_kernel,
    out_arguments,
    return_types,
)
from sbp_torch.boxing.execute import torch_dtype
from sbp_torch.memory.layout import Layouts
from sbp_torch.ops.operators import operator_of

#: Bytes from which on the C library asks the system for every result anew, and gives it back, so
#: that each of its pages is zeroed and mapped again. Source: glibc 2.31 to 2.41, malloc/malloc.c,
#: DEFAULT_MMAP_THRESHOLD_MAX on 64 bits; below, its threshold rises with what is freed.
FRESH_BYTES = 32 * 1024 * 1024


class Arena:
    """The memory that the segments of one rank write again in each step.

    Args:
        slots: What lies in it.
    """

    def __init__(self, slots: RankSlots) -> None:
        self.slots = slots
        self.memory = torch.empty(slots.size_bytes, dtype=torch.uint8)
        self._made: dict[Slot, Tensor] = {}

    def views(self, actor: str) -> tuple[tuple[Tensor, ...], ...]:
        """Return for each firing of a segment the views that it writes and reads."""
        return tuple(
            tuple(self._view(slot) for slot in firing)
            for firing in self.slots.segments[actor].firings
        )

    def _view(self, slot: Slot) -> Tensor:
        made = self._made.get(slot)
        if made is None:
            lies = slot.lies
            start = slot.offset // ITEMSIZE[lies.dtype] + lies.offset
            whole = len(self.memory) // ITEMSIZE[lies.dtype] * ITEMSIZE[lies.dtype]
            flat = self.memory[:whole].view(torch_dtype(lies.dtype))
            made = self._made[slot] = flat.as_strided(lies.shape, lies.strides, start)
        return made


def arenas(
    plan: PhysicalPlan,
    found: Mapping[int, RankLifetimes] | None = None,
    *,
    reads_at_once: bool,
) -> Mapping[int, RankSlots]:
    """Decide what lies in the arena of every rank, unless the plan says so itself.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
        found: Its lifetimes by rank, if they are known.
        reads_at_once: See `rank_slots`; a layout that assumes less is right as well.

    Raises:
        PlanError: an operator does not run on fake tensors.
    """
    if plan.arenas and all(
        reads_at_once or not slots.reads_at_once for slots in plan.arenas.values()
    ):
        return plan.arenas
    found = found or lifetimes(plan, Layouts(plan.steps))
    return {
        rank: rank_slots(plan, held, out_variant, reads_at_once=reads_at_once)
        for rank, held in found.items()
    }


def worthwhile(
    plan: PhysicalPlan, ranks: Iterable[int], *, reads_at_once: bool
) -> Mapping[int, RankSlots]:
    """Decide what lies in the arenas of those ranks that save memory from the system by one.

    Such a rank writes a result of `FRESH_BYTES` or more. Others would be hardly faster, and hold
    the arena's memory where their optimizer needs none of it. Nothing is laid out if no rank has a
    segment that makes so much.

    Args:
        plan: See `arenas`.
        ranks: Of whom it is asked.
        reads_at_once: See `arenas`.

    Raises:
        PlanError: an operator does not run on fake tensors.
    """
    large = [
        rank
        for rank in ranks
        if any(
            actor.transient_bytes >= FRESH_BYTES
            for actor in plan.by_rank[rank].actors
            if actor.kind is ActorKind.COMPUTE
        )
    ]
    slots = arenas(plan, reads_at_once=reads_at_once) if large else {}
    return {rank: slots[rank] for rank in large if slots[rank].largest_bytes >= FRESH_BYTES}


def lay_out(
    plan: PhysicalPlan,
    found: Mapping[int, RankLifetimes] | None = None,
    *,
    reads_at_once: bool,
) -> PhysicalPlan:
    """Return the plan with the layout of its arenas, which takes seconds for thousands of nodes.

    Args:
        plan: See `arenas`.
        found: See `arenas`.
        reads_at_once: See `arenas`.

    Raises:
        PlanError: an operator does not run on fake tensors.
    """
    made = replace(plan)
    # No argument of the class, so that no other plan can come with the layout of this one.
    object.__setattr__(made, "arenas", arenas(plan, found, reads_at_once=reads_at_once))
    return made


@cache
def out_variant(op: str) -> OutVariant | None:
    """Return the overload of an operator that writes into given tensors, None if it has none.

    Only those with a kernel of their own: others compute as before, and copy.
    """
    function = operator_of(op) if not op.startswith(("host.", "sbp.")) else None
    if not isinstance(function, OpOverload):
        return None
    wanted = argument_types(function)
    if any(kind != "Tensor" for kind in return_types(function)):
        return None
    packet = function.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        given = argument_types(other)
        outs = out_arguments(other)
        takes = {key: kind for key, kind in given.items() if key not in outs}
        same = list(takes.items()) == list(wanted.items())
        if same and len(outs) == len(return_types(function)) and has_cpu_kernel(other):
            namespace, kind, _ = op.split(".")
            return OutVariant(
                op=f"{namespace}.{kind}.{name}",
                outs=outs,
                elementwise=torch.Tag.pointwise in function.tags,
            )
    return None
