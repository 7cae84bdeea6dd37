"""Which states a session has, and what its local ranks own of them."""

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

#: A part of a state: of which rank, and by which name ranks know it.
Part = tuple[int, str]


class StateLayout:
    """The states of a session, until it is given more; nothing of this changes.

    Args:
        plan: Its slots are the states.
        ranks: Of this process.
        updating: The plans whose updates overwrite states, one of which runs at a time.
    """

    def __init__(
        self, plan: PhysicalPlan, ranks: Iterable[int], updating: Iterable[PhysicalPlan]
    ) -> None:
        self.plan, self._ranks, self.updating = plan, frozenset(ranks), tuple(updating)

    @cached_property
    def slots(self) -> Mapping[str, StateSlot]:
        """One slot of every state of the plan, by the name that ranks know it by."""
        return state_slots(self.plan)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all states: those of `state_dict`."""
        return tuple(tied for name in self.slots for tied in self.names_of(name))

    def names_of(self, slot_name: str) -> tuple[str, ...]:
        """Return the states that are kept as one: several, of a host number that is tied."""
        return self.plan.ties.get(slot_name, (slot_name,))

    @property
    def numbers(self) -> Mapping[str, str]:
        """The states that are kept as host numbers, each with the name of its slot."""
        return {
            tied: name
            for name, slot in self.slots.items()
            if slot.sbp is None
            for tied in self.names_of(name)
        }

    @cached_property
    def held(self) -> frozenset[str]:
        """The states, but for host numbers, of which a local rank has a part."""
        return frozenset(
            name
            for name, slot in self.slots.items()
            if slot.sbp is not None
            and not self._ranks.isdisjoint(self.plan.stages[slot.stage].rank_list)
        )

    @cached_property
    def owned(self) -> tuple[tuple[int, str, Bounds], ...]:
        """What the local ranks own: rank, slot of the state, and where its part is in it."""
        return self.owned_among()

    def owned_among(
        self, among: Collection[int] | None = None
    ) -> tuple[tuple[int, str, Bounds], ...]:
        """Return what they own if only some ranks are left; see `state_owners`."""
        return tuple(
            (rank, name, bounds)
            for name, owners in state_owners(self.plan, among).items()
            for rank, bounds in owners.items()
            if rank in self._ranks
        )

    def index(self, rank: int, name: str, bounds: Bounds) -> tuple[slice, ...] | None:
        """Return where in what a rank holds that lies which it owns; None if it owns all of it."""
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
        """Return what a rank owns of what it holds: no copy."""
        return part_of(value, self._owned_indices[part])

    def slices_of(
        self, name: str, bounds: Bounds, tied_dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[StateSlice]:
        """Yield the slice of what is kept as one: of several states, of a host number."""
        slot = self.slots[name]
        for tied in self.names_of(name):
            dtype = slot.dtype
            if slot.sbp is None:
                dtype = str(tied_dtypes[tied]).removeprefix("torch.")
            yield StateSlice(name=tied, shape=slot.shape, dtype=dtype, bounds=bounds)

    @cached_property
    def places(self) -> Mapping[Part, tuple[int, int]]:
        """When an update overwrites a part of a state: its firing, and the instruction in it."""
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
        """What the local ranks own and updates overwrite, in the order in which they do."""
        owned = [(rank, name) for rank, name, _ in self.owned if (rank, name) in self.places]
        return dict.fromkeys(sorted(owned, key=lambda part: (*self.places[part], part)))

    @cached_property
    def owned_in_order(self) -> tuple[tuple[int, str, Bounds], ...]:
        """What the local ranks own: first what no update overwrites, then in their order."""
        order = {part: index for index, part in enumerate(self.overwritten)}
        return tuple(sorted(self.owned, key=lambda entry: order.get(entry[:2], -1)))


def part_of(value: Tensor | Number, index: tuple[slice, ...] | None) -> Tensor | Number:
    """Return a part of what a rank holds, no copy; all of it of None."""
    if index is None:
        return value
    assert isinstance(value, Tensor), "host numbers have no parts"
    return value[index]
