"""`StateLayout`: which slices of parameters, buffers and optimizer states each rank holds and owns.

These are the states of a session (a running plan). A rank holds a shard of a state. If several
ranks hold the same slice, one of them owns it (`state_owners`) and writes it into checkpoints. A
slot is a state of the plan. Several equal host numbers, such as the step counters of all
parameters, may share a slot: they are tied. The layout also knows when an update overwrites an
owned slice, so that a snapshot can copy it before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sbp_core.boxing import Bounds, bounds_of
from sbp_core.compile import Compute, PhysicalPlan, StateSlot, first_overwrites
from sbp_core.runtime import StateSlice, state_owners, state_slots

if TYPE_CHECKING:
    from sbp_core.runtime import Number

#: The values of a rank by name: tensors and host numbers.
Values = dict[str, "Tensor | Number"]

#: A part of a state: its rank and the name of its slot.
Part = tuple[int, str]


class StateLayout:
    """The states of a session. Immutable: a session that gets more states makes a new layout.

    Args:
        plan: The plan; its slots are the states.
        ranks: The ranks of this process.
        updating: The plans whose updates overwrite states; one of them runs at a time.
    """

    def __init__(
        self, plan: PhysicalPlan, ranks: Iterable[int], updating: Iterable[PhysicalPlan]
    ) -> None:
        self.plan, self._ranks, self.updating = plan, frozenset(ranks), tuple(updating)

    @cached_property
    def slots(self) -> Mapping[str, StateSlot]:
        """One slot of every state of the plan, by the name of the slot."""
        return state_slots(self.plan)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all states, as in `state_dict`."""
        return tuple(tied for name in self.slots for tied in self.names_of(name))

    def names_of(self, slot_name: str) -> tuple[str, ...]:
        """Return the names of the states in a slot: several if they are tied."""
        return self.plan.ties.get(slot_name, (slot_name,))

    @property
    def numbers(self) -> Mapping[str, str]:
        """State that is kept as a host number -> name of its slot."""
        return {
            tied: name
            for name, slot in self.slots.items()
            if slot.sbp is None
            for tied in self.names_of(name)
        }

    @cached_property
    def held(self) -> frozenset[str]:
        """The states, except host numbers, of which a local rank has a part."""
        return frozenset(
            name
            for name, slot in self.slots.items()
            if slot.sbp is not None
            and not self._ranks.isdisjoint(self.plan.stages[slot.stage].rank_list)
        )

    @cached_property
    def owned(self) -> tuple[tuple[int, str, Bounds], ...]:
        """The slices that the local ranks own: rank, slot, and bounds in the whole state."""
        return self.owned_among()

    def owned_among(
        self, among: Collection[int] | None = None
    ) -> tuple[tuple[int, str, Bounds], ...]:
        """Return the slices that local ranks own if only the ranks `among` are alive."""
        return tuple(
            (rank, name, bounds)
            for name, owners in state_owners(self.plan, among).items()
            for rank, bounds in owners.items()
            if rank in self._ranks
        )

    def index(self, rank: int, name: str, bounds: Bounds) -> tuple[slice, ...] | None:
        """Return the position of an owned slice in the rank's shard; None if it is all of it."""
        slot = self.slots[name]
        if slot.sbp is None:
            return None
        held = bounds_of(slot.shape, self.plan.stages[slot.stage], slot.sbp)[rank]
        if held == bounds:
            return None
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(bounds, held, strict=True)
        )

    @cached_property
    def _owned_indices(self) -> Mapping[Part, tuple[slice, ...] | None]:
        return {(rank, name): self.index(rank, name, bounds) for rank, name, bounds in self.owned}

    def owned_part(self, part: Part, value: Tensor | Number) -> Tensor | Number:
        """Return the owned slice of a rank's shard, without a copy."""
        return part_of(value, self._owned_indices[part])

    def slices_of(
        self, name: str, bounds: Bounds, tied_dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[StateSlice]:
        """Yield a slice of a slot for each state in it: several if it is a tied host number."""
        slot = self.slots[name]
        for tied in self.names_of(name):
            dtype = slot.dtype
            if slot.sbp is None:
                dtype = str(tied_dtypes[tied]).removeprefix("torch.")
            yield StateSlice(name=tied, shape=slot.shape, dtype=dtype, bounds=bounds)

    @cached_property
    def places(self) -> Mapping[Part, tuple[int, int]]:
        """Part that an update overwrites -> position of the firing, and the instruction in it."""
        found: dict[Part, tuple[int, int]] = {}
        for plan in self.updating:
            for part in plan.ranks:
                for order in part.orders.values():
                    for place, (name, _) in enumerate(order):
                        actor = part.by_name[name]
                        firsts = first_overwrites(actor) if isinstance(actor, Compute) else {}
                        inside = {state: at for at, states in firsts.items() for state in states}
                        for state in actor.in_place:
                            at = (place, inside.get(state, len(inside)))
                            found.setdefault((part.rank, state), at)
        return found

    @cached_property
    def overwritten(self) -> Mapping[Part, None]:
        """The parts that local ranks own and updates overwrite, in the order of the updates."""
        owned = [(rank, name) for rank, name, _ in self.owned if (rank, name) in self.places]
        return dict.fromkeys(sorted(owned, key=lambda part: (*self.places[part], part)))

    @cached_property
    def owned_in_order(self) -> tuple[tuple[int, str, Bounds], ...]:
        """The owned slices: first those that no update overwrites, then in the order of updates."""
        order = {part: index for index, part in enumerate(self.overwritten)}
        return tuple(sorted(self.owned, key=lambda entry: order.get(entry[:2], -1)))


def part_of(value: Tensor | Number, index: tuple[slice, ...] | None) -> Tensor | Number:
    """Return a slice of a rank's shard, without a copy; the whole shard if `index` is None."""
    if index is None:
        return value
    assert isinstance(value, Tensor), "host numbers have no parts"
    return value[index]
