"""Find which work of a step has surely ended when an actor begins: vector clocks.

`hazards` asks, to prove that no state is overwritten too early. A firing is one execution of an
actor, a unit of work of a rank. A register holds the results of an actor.

Firings of one thread follow each other. A reader of a register begins after it was filled, a
receiver after the message was sent; and no rank leaves an all-reduce before all have entered it.
Nothing else is counted: in other collectives, and in transfers, a rank need not wait for ranks that
send it nothing.

    thread (0, compute)   f |1   2| reduce |3   4| update |5        moments of each thread
    thread (1, compute)   f |1   2| reduce |3   4| update |5
                                                   the clock when `update` of rank 0 begins:
                                                   5 of its own thread, 3 of the other one

The n-th firing of a thread begins at moment 2n - 1 and ends at 2n. A clock has, for each thread,
the last moment that has passed for certain. Ranks share a clock until what they know differs, so it
is one array for all threads, with the few numbers of the actor's own rank next to it.

Source: Mattern, Virtual time and global states of distributed systems, 1989.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sbp_core.boxing.slices import transfer_partners
from sbp_core.boxing.step import StepKind
from sbp_core.compile.actors import Actor, ActorId, Collective, Send
from sbp_core.compile.physical import PhysicalPlan, RankPlan, Register
from sbp_core.compile.symmetry import FoldedPlan

#: A moment of each thread of all ranks.
Moments: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Clock:
    """The moments that have passed when something begins.

    Args:
        others: Moments of the threads of all ranks; for its own rank they may be older than `own`.
        first: The number of the first thread of its own rank.
        own: Moments of the threads of its own rank.
    """

    others: Moments
    first: int
    own: tuple[int, ...]

    def has_been(self, thread: int, moment: int) -> bool:
        """Whether a moment of a thread has passed."""
        at = thread - self.first
        if 0 <= at < len(self.own):
            return moment <= self.own[at]
        return bool(moment <= self.others[thread])


class HappensBefore:
    """The clocks of one step of a plan.

    Args:
        plan: A plan that comes to its end.
        folded: The same plan, of one rank of each class.
        firings: All firings of a step of the folded plan, in any possible order; the firings of a
            collective after each other.
        wanted: Actors that fire once, whose clocks are kept.
        alone: Whether ranks know only of themselves. Then one rank of each class stands for all,
            and `plan` is the folded plan: a rank's own knowledge follows from its own firings.
    """

    def __init__(
        self,
        plan: PhysicalPlan,
        folded: FoldedPlan,
        firings: Sequence[ActorId],
        wanted: Collection[ActorId],
        *,
        alone: bool = False,
    ) -> None:
        self.plan = plan
        self._clocks: dict[ActorId, Clock] = {}
        names = [(part.rank, thread) for part in plan.ranks for thread in part.orders]
        #: The numbers of threads; the numbers of one rank follow each other.
        self._numbers = {thread: number for number, thread in enumerate(names)}
        self._first = {rank: self._numbers[rank, thread] for rank, thread in reversed(names)}
        nothing = np.zeros(len(names), dtype=np.int64)
        #: The knowledge of each thread: about all ranks, and about the threads of its own.
        self._others: dict[tuple[int, str], Moments] = dict.fromkeys(names, nothing)
        self._own = {
            (part.rank, thread): [0] * len(part.orders)
            for part in plan.ranks
            for thread in part.orders
        }
        #: The moment at which an actor's last firing so far began.
        self._began: dict[ActorId, int] = {}
        self._index: dict[ActorId, int] = defaultdict(lambda: -1)
        self._waits = {
            (part.rank, name): waits for part in plan.ranks for name, waits in _waits(part).items()
        }
        self._hears = {} if alone else _messages(plan)
        #: The knowledge at the end of each firing, of actors whose clock is needed.
        self._ends: dict[ActorId, list[Clock]] = {
            (rank, producer.name): []
            for (rank, _), waits in self._waits.items()
            for producer, _ in waits
        }
        # Messages may come from another rank of a class than the one that fires alone: its clocks
        # are kept, to be copied to the class, see `_spread`.
        heard = (sender for senders in self._hears.values() for sender in senders)
        for rank, name in heard:
            self._ends |= {(rank, name): [], (folded.stands_for[rank], name): []}
        if alone:
            self._fire_alone(firings, wanted)
            return
        met = self._first_meeting(firings, wanted)
        self._fire_alone(firings[:met], ())
        self._spread(folded)
        self._fire(folded.unfolded(firings[met:]), wanted)

    def _first_meeting(self, firings: Sequence[ActorId], wanted: Collection[ActorId]) -> int:
        """Return the index of the first all-reduce of all ranks, if it is before all `wanted`.

        A rank that leaves it knows everything that each rank knew of itself. So ranks need not know
        of each other before. To know less is safe: then less is proved.
        """
        for place, (rank, name) in enumerate(firings):
            if (rank, name) in wanted:
                break
            actor = self.plan.by_rank[rank].by_name[name]
            if not isinstance(actor, Collective) or not self._waits_for_all(actor):
                continue
            if len(self.plan.steps[actor.step].group(rank)) == len(self.plan.ranks):
                return place
        return 0

    def _fire_alone(self, firings: Iterable[ActorId], wanted: Collection[ActorId]) -> None:
        """Let one rank of each class fire, without messages from other ranks."""
        for actor_id in firings:
            actor = self.plan.by_rank[actor_id[0]].by_name[actor_id[1]]
            clock = self._begin(actor_id, actor, hears=False)
            if actor_id in wanted:
                self._clocks[actor_id] = clock
            self._end(actor_id, actor, clock.others)

    def _spread(self, folded: FoldedPlan) -> None:
        """Copy the knowledge of the rank that has fired alone to the other ranks of its class."""
        for rank, members in folded.members.items():
            part = folded.plan.by_rank[rank]
            for member in members[1:]:
                for thread in part.orders:
                    self._own[member, thread] = self._own[rank, thread].copy()
                for name in part.by_name:
                    if (rank, name) in self._began:
                        self._began[member, name] = self._began[rank, name]
                        self._index[member, name] = self._index[rank, name]
                    if (rank, name) in self._ends and (member, name) in self._ends:
                        self._ends[member, name] = self._ends[rank, name].copy()

    def _fire(self, firings: Iterable[ActorId], wanted: Collection[ActorId]) -> None:
        """Let all ranks fire."""
        plan = self.plan
        #: The ranks that have entered a collective that waits for all, and their final number.
        come: list[tuple[ActorId, Actor]] = []
        num_awaited = 0
        for actor_id in firings:
            actor = plan.by_rank[actor_id[0]].by_name[actor_id[1]]
            clock = self._begin(actor_id, actor)
            if actor_id in wanted:
                self._clocks[actor_id] = clock
            if not (isinstance(actor, Collective) and self._waits_for_all(actor)):
                self._end(actor_id, actor, clock.others)
                continue
            if not come:
                num_awaited = len(plan.steps[actor.step].group(actor_id[0]))
            come.append((actor_id, actor))
            if len(come) == num_awaited:
                # Every rank now knows what any of them knew on entry.
                threads = [(rank, its_actor.thread) for (rank, _), its_actor in come]
                known = {id(self._others[thread]): self._others[thread] for thread in threads}
                everybody: Moments = np.maximum.reduce(list(known.values()))
                for rank, thread in threads:
                    _note(everybody, self._first[rank], self._own[rank, thread])
                for one, its_actor in come:
                    self._end(one, its_actor, everybody)
                come = []

    def clock(self, actor_id: ActorId) -> Clock:
        """Return the clock at the start of an actor's only firing; the actor was `wanted`."""
        return self._clocks[actor_id]

    def is_over(self, actor_id: ActorId, clock: Clock) -> bool:
        """Whether all firings of an actor have ended at a clock."""
        over = self.over(actor_id)
        return over is not None and clock.has_been(*over)

    def over(self, actor_id: ActorId) -> tuple[int, int] | None:
        """Return the thread and moment from which on all firings of an actor have ended.

        None if it overlaps and no actor waits for its end.
        """
        rank, name = actor_id
        part = self.plan.by_rank[rank]
        actor = part.by_name[name]
        if not actor.overlaps:
            return self._numbers[rank, actor.thread], self._began[actor_id] + 1
        # A collective that has begun has ended when an actor takes its result, hence before that
        # firing. Only an actor that takes each result knows of all firings.
        takers = [
            part.by_name[consumer]
            for register in part.outputs_of[name]
            if register.rate is actor.rate and not register.carries
            for consumer in register.consumers
        ]
        takers.sort(key=lambda taker: (taker.thread != actor.thread, self._began[rank, taker.name]))
        if not takers:
            return None
        return self._numbers[rank, takers[0].thread], self._began[rank, takers[0].name]

    def _begin(self, actor_id: ActorId, actor: Actor, *, hears: bool = True) -> Clock:
        """Let an actor wait for its inputs and begin; return the clock at that point.

        Args:
            actor_id: Its name and rank.
            actor: The same actor.
            hears: Whether it learns from messages of other ranks.
        """
        plan, rank, thread = self.plan, actor_id[0], (actor_id[0], actor.thread)
        self._index[actor_id] = index = self._index[actor_id] + 1
        own, others = self._own[thread], self._others[thread]
        for producer, register in self._waits.get(actor_id, ()):
            # The firing of the producer that fills this register; below 0 it is not in this step.
            filling = index // plan.firings_per_filling(actor, register) - register.initial
            firing = (filling + 1) * plan.firings_per_filling(producer, register) - 1
            if firing >= 0:
                end = self._ends[rank, producer.name][firing]
                others = _later(others, end.others)
                own[:] = map(max, own, end.own)
        for sender in self._hears.get(actor_id, ()) if hears else ():
            end = self._ends[sender][index]
            others = _later(others, end.others).copy()
            _note(others, self._first[sender[0]], end.own)
        self._others[thread] = others
        at = self._numbers[thread] - self._first[rank]
        own[at] += 1  # the thread's work before this is over
        self._began[actor_id] = own[at]
        return Clock(others, self._first[rank], tuple(own))

    def _end(self, actor_id: ActorId, actor: Actor, others: Moments) -> None:
        """Let an actor end its firing, with the given knowledge of all ranks."""
        rank, thread = actor_id[0], (actor_id[0], actor.thread)
        own, at = self._own[thread], self._numbers[thread] - self._first[rank]
        own[at] += 1
        if not actor.overlaps:
            self._others[thread] = others
        if actor_id in self._ends:
            self._ends[actor_id].append(Clock(others, self._first[rank], tuple(own)))

    def _waits_for_all(self, actor: Collective) -> bool:
        step = self.plan.steps[actor.step]
        return step.kind is StepKind.ALL_REDUCE and 0 not in step.shape


def _waits(part: RankPlan) -> Mapping[str, list[tuple[Actor, Register]]]:
    """Return for each actor of a rank the actors whose ends it waits for, except by its thread.

    Work that has begun and continues in parallel with its thread is included.
    """
    found: dict[str, list[tuple[Actor, Register]]] = defaultdict(list)
    for register in part.registers:
        producer = part.by_name[register.producer]
        for name in register.consumers:
            if producer.overlaps or part.by_name[name].thread != producer.thread:
                found[name].append((producer, register))
    return found


def _messages(plan: PhysicalPlan) -> Mapping[ActorId, list[ActorId]]:
    """Return for each receive the sends, on other ranks, that send it something."""
    found: dict[ActorId, list[ActorId]] = defaultdict(list)
    senders: dict[int, Mapping[int, tuple[int, ...]]] = {}
    for link in plan.links:
        (rank, name), (receiver, _) = link.sender, link.receiver
        actor = plan.by_rank[rank].by_name[name]
        assert isinstance(actor, Send), "a link leads from one that sends"
        if actor.step not in senders:
            _, senders[actor.step] = transfer_partners(plan.steps[actor.step])
        if rank != receiver and rank in senders[actor.step].get(receiver, ()):
            found[link.receiver].append(link.sender)
    return found


def _later(one: Moments, other: Moments) -> Moments:
    """Return the later moment of each thread; one of the two arguments itself if possible."""
    if one is other or (other <= one).all():
        return one
    return other if (one <= other).all() else np.maximum(one, other)


def _note(moments: Moments, first: int, own: Sequence[int]) -> None:
    """Record what a rank knows of its own threads."""
    at = slice(first, first + len(own))
    moments[at] = np.maximum(moments[at], own)
