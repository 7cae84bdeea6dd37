"""What happens on one rank in a step, in order: its firings, and when others take what it sent.

Values never cross ranks, only moments do: what a rank holds follows from the order of its own
firings, and from when each of its messages is taken. So the order of all ranks is found once, by
counts alone, and each rank is replayed by itself.

    order of all ranks    (0, f) (0, send) (1, f) (1, receive) (0, g) (1, g)
    events of rank 0      (0, f) (0, send)        (1, receive) (0, g)
    events of rank 1                       (1, f) (1, receive)        (1, g)

Nothing of how values lie is here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sbp_core.compile.actors import ActorId
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.symmetry import FoldedPlan
from sbp_core.compile.token_game import TokenGame
from sbp_core.interpreter.firings import Group, firing_order

#: Firings of a rank, and receives of other ranks of what it sent.
Events = list[ActorId]

#: Most entries of a table of firings by ranks, of 4 bytes each.
_MOST_ENTRIES = 2**25


def events_by_rank(plan: PhysicalPlan, order: Iterable[Group]) -> dict[int, Events]:
    """Return the events of each rank of a plan, in the order in which all ranks fire."""
    senders = _senders(plan)
    found: dict[int, Events] = {part.rank: [] for part in plan.ranks}
    for group in order:
        for actor_id in group:
            found[actor_id[0]].append(actor_id)
            for sender in senders.get(actor_id, ()):
                found[sender].append(actor_id)
    return found


def events_ahead(
    folded: FoldedPlan, order: Sequence[Group], ranks: Sequence[int]
) -> Iterator[tuple[int, Events]]:
    """Yield ranks with their events when each is as far ahead of all others as can be.

    Others take its messages as late as they may: just before a firing of the rank that waits for
    it, or that waits for what comes after it.

    Args:
        folded: The plan.
        order: Any in which its actors may fire.
        ranks: Whose events are wanted.
    """
    # A rank of several threads chooses among them, as far as each can go.
    one_thread = [rank for rank in ranks if len(folded.plan.by_rank[rank].orders) == 1]
    for rank in ranks:
        if rank not in one_thread:
            ahead = firing_order(folded.plan, folded.stands_for, ahead=rank)
            assert ahead is not None, "there is an order that comes to its end"
            yield rank, events_by_rank(folded.plan, ahead)[rank]
    waits = _Waits(folded, order)
    width = max(1, _MOST_ENTRIES // max(1, len(order)))
    for start in range(0, len(one_thread), width):
        chunk = one_thread[start : start + width]
        table = waits.awaited_by(chunk)
        for column, rank in enumerate(chunk):
            yield rank, waits.merged(rank, table[:, column])


class _Waits:
    """Which firings wait for which, of all ranks.

    Args:
        folded: The plan.
        order: In which its actors may fire; a group has the number of its place here.
    """

    def __init__(self, folded: FoldedPlan, order: Sequence[Group]) -> None:
        self.plan, self.order = folded.plan, order
        self.receivers: dict[int, list[ActorId]] = defaultdict(list)
        for receiver, senders in _senders(folded.plan).items():
            for sender in senders:
                self.receivers[sender].append(receiver)
        game = TokenGame(folded.plan, folded.stands_for)
        #: Of each actor, the numbers of its firings.
        self.numbers: dict[ActorId, list[int]] = defaultdict(list)
        #: Of each group, whom it waits for.
        self.before: list[list[int]] = []
        last: dict[tuple[int, str], int] = {}
        for number, group in enumerate(order):
            before: list[int] = []
            for actor_id in group:
                thread = actor_id[0], game.actor(actor_id).thread
                if thread in last:
                    before.append(last[thread])
                index = len(self.numbers[actor_id])
                for need in game.needs(actor_id):
                    if (count := need.count(index)) > 0:
                        before.append(self.numbers[need.on][count - 1])
                last[thread] = number
            for actor_id in group:
                self.numbers[actor_id].append(number)
            self.before.append(before)

    def awaited_by(self, ranks: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return for each firing and rank the first firing of the rank that waits for it.

        Firings of a rank are counted in their order; what none waits for has a number after all.
        """
        # From the last firing to the first: who waits for a firing waits for what that waits for.
        columns = {rank: column for column, rank in enumerate(ranks)}
        table = np.full((len(self.order), len(ranks)), np.iinfo(np.int32).max, dtype=np.int32)
        fired = dict.fromkeys(ranks, 0)
        for number, group in enumerate(self.order):
            for rank, _ in group:
                if rank in columns:
                    table[number, columns[rank]] = fired[rank]
                    fired[rank] += 1
        rows = list(table)  # views
        for number in range(len(rows) - 1, -1, -1):
            row = rows[number]
            for one in self.before[number]:
                np.minimum(rows[one], row, out=rows[one])
        return table

    def merged(self, rank: int, awaited: npt.NDArray[np.int32]) -> Events:
        """Return the events of a rank, whose messages are taken before what waits for them."""
        taken: dict[int, Events] = defaultdict(list)
        for receiver in self.receivers[rank]:
            for number in self.numbers[receiver]:
                taken[int(awaited[number])].append(receiver)
        events: Events = []
        own = (actor_id for group in self.order for actor_id in group if actor_id[0] == rank)
        for place, actor_id in enumerate(own):
            events += taken.get(place, ())
            events.append(actor_id)
        return events


def _senders(plan: PhysicalPlan) -> Mapping[ActorId, Sequence[int]]:
    """Return for each receive the other ranks that send it something."""
    found: dict[ActorId, list[int]] = defaultdict(list)
    for link in plan.links:
        if link.sender[0] != link.receiver[0]:
            found[link.receiver].append(link.sender[0])
    return found
