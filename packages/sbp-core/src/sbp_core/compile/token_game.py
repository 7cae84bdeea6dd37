"""`TokenGame`: a simulation of a plan by counts alone: which actors may fire (execute) next.

Registers and channels are first-in first-out, so a count of fillings and a count of readings by
each consumer is their whole state. The scheduler plays the game to find an order; the interpreter
plays it again in that order.

    register r of quota 2, from f to g      f finished   g finished   filled  live   f may  g may
    the step begins                         0            0            0       0      yes    no
    f                                       1            0            1       1      yes    yes
    f                                       2            0            2       2      no     yes
    g                                       2            1            2       1      yes    yes

A full register means that its producer lacks a credit: back pressure is data in the other
direction. A register that carries states has more fillings than its producer has made: the states
themselves, with which the step begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from sbp_core.compile.actors import Actor, ActorId, Collective
from sbp_core.compile.physical import Channel, PhysicalPlan, Register


@dataclass(frozen=True, slots=True)
class Wait:
    """Why an actor cannot fire: the missing data or credit, and the actor that would provide it."""

    reason: str
    on: ActorId


class Need(NamedTuple):
    """The firings of another actor that the firings of an actor wait for, as a formula.

    Firing `index` may start when `on` has finished `(index // per + ahead) * times` firings.

    Args:
        on: The actor that is waited for.
        per: How many firings take, or fill, one filling.
        ahead: Fillings needed beyond the earlier firings' ones; less the fillings already there.
        times: How many firings of `on` make or take a filling.
        last_only: Whether only the last of `per` firings waits.
        what: The reason of the wait, in words.
    """

    on: ActorId
    per: int
    ahead: int
    times: int
    last_only: bool
    what: str

    def count(self, index: int) -> int:
        """Return how many firings of `on` must have ended; 0 or less for none."""
        if self.last_only and (index + 1) % self.per:
            return 0
        return (index // self.per + self.ahead) * self.times


# The plan is a marked graph: each register has one producer, and each consumer a separate count. So
# no other actor takes data or credit away from a ready actor, which stays ready until it starts.
# This is why any order of firings leads to the same end (Kahn), and why schedulers need to check
# only the `neighbours` of an actor that has finished.
class TokenGame:
    """The marking of a plan within one step. A firing starts (takes) and finishes (gives).

    Args:
        plan: The plan.
        stands_for: For a folded plan (`symmetry`), the representative of each rank.
    """

    def __init__(
        self, plan: PhysicalPlan, stands_for: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        self.plan = plan
        self._stands_for = stands_for
        self.started: dict[ActorId, int] = defaultdict(int)
        self.finished: dict[ActorId, int] = defaultdict(int)
        self.sends: dict[ActorId, list[Channel]] = defaultdict(list)
        self.receives: dict[ActorId, list[Channel]] = defaultdict(list)
        self._partners: dict[ActorId, tuple[ActorId, ...]] = {}
        # Facts about each actor that are needed often and do not change.
        self._needs: dict[ActorId, tuple[Need, ...]] = {}
        self._neighbours: dict[ActorId, frozenset[ActorId]] = {}
        self._totals: dict[ActorId, int] = {}
        for link in plan.links:
            self.sends[link.sender].append(link)
            self.receives[link.receiver].append(link)

    def actor(self, actor_id: ActorId) -> Actor:
        """Return an actor of the plan."""
        return self.plan.by_rank[actor_id[0]].by_name[actor_id[1]]

    def total(self, actor_id: ActorId) -> int:
        """Return how often an actor fires in a step."""
        known = self._totals.get(actor_id)
        if known is None:
            known = self.actor(actor_id).num_firings(self.plan.repetitions)
            self._totals[actor_id] = known
        return known

    def is_done(self, actor_id: ActorId) -> bool:
        """Whether an actor has started all its firings of the step."""
        return self.started[actor_id] >= self.total(actor_id)

    def filled(self, rank: int, register: Register) -> int:
        """Return how often a register has been filled."""
        # With carried states the count starts ahead: the last filling is the first of the next
        # step, so a step ends in the marking that it began with.
        producer = (rank, register.producer)
        # A sum is full when the last micro-batch is in it.
        firings = self._firings_per_filling(producer, register)
        return self.finished[producer] // firings + register.initial

    def live(self, rank: int, register: Register) -> int:
        """Return how many fillings of a register are alive: not yet read by all consumers."""
        # How many fillings the slowest consumer has finished.
        consumers = [(rank, name) for name in register.consumers]
        read = min(self.finished[c] // self._firings_per_filling(c, register) for c in consumers)
        return self.filled(rank, register) - read

    def _firings_per_filling(self, actor_id: ActorId, register: Register) -> int:
        return self.plan.firings_per_filling(self.actor(actor_id), register)

    def needs(self, actor_id: ActorId) -> tuple[Need, ...]:
        """Return the waits of an actor's firings, in the order in which messages list them."""
        known = self._needs.get(actor_id)
        if known is None:
            known = self._needs[actor_id] = tuple(self._found_needs(actor_id))
        return known

    def _found_needs(self, actor_id: ActorId) -> Iterator[Need]:
        rank, name = actor_id
        part = self.plan.by_rank[rank]
        for register in part.inputs_of[name]:
            # Data. The n-th firing (from 0) reads the n-th filling: a consumer reads each filling
            # of a register, in order; fillings of an update once for each of its micro-batches.
            # Fillings count from the end of a firing.
            producer = (rank, register.producer)
            yield Need(
                on=producer,
                per=self._firings_per_filling(actor_id, register),
                ahead=1 - register.initial,
                times=self._firings_per_filling(producer, register),
                last_only=False,
                what=f"data in register {register.name}",
            )
        for link in self.receives[actor_id]:
            yield Need(link.sender, 1, 1, 1, False, f"data on link {link.name}")
        for register in part.outputs_of[name]:
            # Credit. A place is taken at the start of a firing, so it is counted by `started`, and
            # given back at the end of the reader's firing. All consumers must have read a filling
            # before its place is free. The last of several firings fills it.
            for consumer in register.consumers:
                yield Need(
                    on=(rank, consumer),
                    per=self._firings_per_filling(actor_id, register),
                    ahead=1 + register.initial - register.quota,
                    times=self._firings_per_filling((rank, consumer), register),
                    last_only=True,
                    what=f"credit of register {register.name} ({register.quota})",
                )
        for link in self.sends[actor_id]:
            what = f"credit of link {link.name} ({link.quota})"
            yield Need(link.receiver, 1, 1 - link.quota, 1, False, what)

    def waits(self, actor_id: ActorId) -> Iterator[Wait]:
        """Yield the reasons why an actor cannot start its next firing; nothing if it can."""
        index = self.started[actor_id]
        for need in self.needs(actor_id):
            if self.finished[need.on] < need.count(index):
                yield Wait(f"waits for {need.what}", need.on)

    def is_ready(self, actor_id: ActorId) -> bool:
        """Whether an actor has all data and credits for its next firing."""
        index, finished = self.started[actor_id], self.finished
        if index >= self.total(actor_id):
            return False
        # Like `waits`, without the words: this is called more often than anything else.
        for on, per, ahead, times, last_only, _ in self.needs(actor_id):
            if finished[on] < (index // per + ahead) * times and not (
                last_only and (index + 1) % per
            ):
                return False
        return True

    def start(self, actor_id: ActorId) -> int:
        """Take the credits of a firing and return its index."""
        index = self.started[actor_id]
        self.started[actor_id] += 1
        return index

    def finish(self, actor_id: ActorId) -> None:
        """Fill the outputs of a firing and give its inputs' credits back."""
        self.finished[actor_id] += 1

    def neighbours(self, actor_id: ActorId) -> frozenset[ActorId]:
        """Return the actors that a finished firing may have made ready, itself among them."""
        known = self._neighbours.get(actor_id)
        if known is None:
            rank, name = actor_id
            part = self.plan.by_rank[rank]
            found = {actor_id}
            found.update((rank, reader) for r in part.outputs_of[name] for reader in r.consumers)
            found.update((rank, register.producer) for register in part.inputs_of[name])
            found.update(link.receiver for link in self.sends[actor_id])
            found.update(link.sender for link in self.receives[actor_id])
            known = self._neighbours[actor_id] = frozenset(found)
        return known

    def partners(self, actor_id: ActorId) -> tuple[ActorId, ...]:
        """Return the actors that fire together: a collective on its group, else the actor alone."""
        known = self._partners.get(actor_id)
        if known is None:
            found, rank = self.actor(actor_id), actor_id[0]
            known = (actor_id,)
            if isinstance(found, Collective):
                group = self.plan.steps[found.step].group(rank)
                ranks = dict.fromkeys(self._stands_for.get(other, other) for other in group)
                known = tuple((other, found.name) for other in ranks)
            # One object for the whole group.
            self._partners |= dict.fromkeys(known, known)
        return known
