"""The arena of a rank: one block of memory, and the views that segments write. Knows torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from sbp_core._torch_compat import (
    OpOverload,
    argument_types,
    has_cpu_kernel,
    out_arguments,
    return_types,
)
from sbp_core.boxing.execute import torch_dtype
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.graph.ir import ITEMSIZE
from sbp_core.memory.layout import Layouts
from sbp_core.memory.lifetime import RankLifetimes, lifetimes
from sbp_core.memory.slots import OutVariant, RankSlots, Slot, rank_slots
from sbp_core.runtime.operators import operator_of


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
    """Decide what lies in the arena of every rank.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
        found: Its lifetimes by rank, if they are known.
        reads_at_once: See `rank_slots`.

    Raises:
        PlanError: an operator does not run on fake tensors.
    """
    found = found or lifetimes(plan, Layouts(plan.steps))
    return {
        rank: rank_slots(plan, held, out_variant, reads_at_once=reads_at_once)
        for rank, held in found.items()
    }


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
