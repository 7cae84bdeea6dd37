"""Which states of a tape depend on one another, and in which order they are made.

A family is a set of storages that entries tie together, with all entries that make them. Families
are made one after another, and nothing of one is held while the next is made:

    entry 0  uniform_(a)                     family {a}      entries 0, 3
    entry 1  normal_(b)                      family {b, c}   entries 1, 2
    entry 2  copy_(c, b)
    entry 3  mul_(a, 2)

Entries that only move the generator, because what they fill is filled again later, are in no
family. Small storages that hold no random numbers, such as a factor that all parameters are
multiplied with, do not tie: each family makes them anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbp_torch.deferred_init.tape import Return, Tape, Window

#: The size up to which a storage without random numbers is made once for each family, in bytes.
CHEAP_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFamily:
    """Storages that are made together.

    Args:
        entries: Numbers of entries on the tape, in order.
        states: The states among what they make, by name.
    """

    entries: tuple[int, ...]
    states: Mapping[str, Window]


def families(tape: Tape, states: Mapping[str, Window]) -> list[StateFamily]:
    """Return the families of some states, in the order of their first entries."""
    needed = tape.needed({window.storage for window in states.values()})
    cheap = _cheap(tape, needed)
    ties = _Ties()
    for number in needed:
        touched = sorted(_tied(tape, number, cheap))
        for storage in touched[1:]:
            ties.tie(touched[0], storage)
    own: dict[int, set[int]] = defaultdict(set)
    for number in needed:
        for storage in _tied(tape, number, cheap):
            own[ties.root(storage)].add(number)
    members: dict[int, dict[str, Window]] = defaultdict(dict)
    for name, window in states.items():
        members[ties.root(window.storage)][name] = window
    found = []
    for root, held in members.items():
        entries = set(own[root])
        for number in own[root]:
            for storage in tape.entries[number].reads & cheap:
                entries |= own[ties.root(storage)]
        found.append(StateFamily(entries=tuple(sorted(entries)), states=held))
    return sorted(found, key=lambda family: family.entries[:1])


def remembered(tape: Tape, made: Sequence[StateFamily]) -> set[int]:
    """Return the positions of the generator to which making families in order comes back."""
    kept = {event.position for event in tape.events if isinstance(event, Return)}
    front = 0
    for family in made:
        events = [e for n in family.entries if (e := tape.entries[n].event) is not None]
        if is_interleaved(events):
            kept.update(events[:-1])
            front = max(front, events[-1])
        kept.update(event for event in events if event < front)
        front = max([front, *(event + 1 for event in events)])
    for number, entry in enumerate(tape.entries):
        if entry.event is not None and not entry.is_blind:
            before = tape.needed(entry.reads, number)
            kept.update(e for n in before if (e := tape.entries[n].event) is not None)
    return kept


def is_interleaved(events: Sequence[int]) -> bool:
    """Whether others draw between the draws of a family."""
    return bool(events) and events[-1] - events[0] >= len(events)


def _cheap(tape: Tape, needed: list[int]) -> set[int]:
    """Return the storages that are small and hold no random numbers."""
    cheap = {number for number, size in enumerate(tape.sizes) if size <= CHEAP_BYTES}
    before = -1
    while len(cheap) != before:
        before = len(cheap)
        for number in needed:
            entry = tape.entries[number]
            random = entry.event is not None or entry.generator is not None
            if random or not entry.reads <= cheap | tape.constants.keys():
                cheap -= entry.writes
    return cheap


def _tied(tape: Tape, number: int, cheap: set[int]) -> set[int]:
    """Return the storages that an entry ties: without what it only reads at little cost."""
    entry = tape.entries[number]
    if entry.writes <= cheap:
        return set(entry.touches)
    return {s for s in entry.touches if s in entry.writes or s not in cheap | tape.constants.keys()}


class _Ties:
    """Sets of storages that grow together."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    def root(self, storage: int) -> int:
        while (parent := self.parents.get(storage, storage)) != storage:
            self.parents[storage] = self.parents.get(parent, parent)
            storage = parent
        return storage

    def tie(self, left: int, right: int) -> None:
        self.parents[self.root(right)] = self.root(left)
