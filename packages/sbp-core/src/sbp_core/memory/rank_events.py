"""List the events of one rank in a step, in order: its firings, and the receives of its messages.

A firing is one execution of an actor (a segment of operators, or a boxing step). Values of one rank
never influence another rank's memory, only times do: the memory of a rank depends on the order of
its own firings, and on when each of its messages is received. So the order of all ranks is found
once, with counters alone, and then `lifetime` replays each rank by itself.

    order of all ranks    (0, f) (0, send) (1, f) (1, receive) (0, g) (1, g)
    events of rank 0      (0, f) (0, send)        (1, receive) (0, g)
    events of rank 1                       (1, f) (1, receive)        (1, g)

This module knows nothing of memory layouts.
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

#: Firings of a rank, and other ranks' receives of its messages.
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
    """Yield ranks with their events when each is as far ahead of all others as possible.

    Other ranks receive its messages as late as possible: just before a firing of the rank that
    waits for the receive, or for a later firing.

    Args:
        folded: The folded plan.
        order: Any valid firing order of its actors.
        ranks: The ranks whose events are wanted.
    """
    # For a rank of several threads, advance each thread as far as it can go.
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
    """The firings that each firing of all ranks waits for.

    Args:
        folded: The folded plan.
        order: A valid firing order; a group is numbered by its position in it.
    """

    def __init__(self, folded: FoldedPlan, order: Sequence[Group]) -> None:
        self.plan, self.order = folded.plan, order
        self.receivers: dict[int, list[ActorId]] = defaultdict(list)
        for receiver, senders in _senders(folded.plan).items():
            for sender in senders:
                self.receivers[sender].append(receiver)
        game = TokenGame(folded.plan, folded.stands_for)
        #: For each actor, the numbers of its firings.
        self.numbers: dict[ActorId, list[int]] = defaultdict(list)
        #: For each group, the groups that it waits for.
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

        Firings of a rank are counted in their order. If none waits, it is larger than all.
        """
        # From the last firing to the first, because waiting is transitive.
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
        """Return the events of a rank; each receive is just before the firing that waits for it."""
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
