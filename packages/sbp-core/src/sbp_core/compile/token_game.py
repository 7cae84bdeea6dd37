"""The token game of a plan: who may fire, given data and credits. Counts only, no tensors.

Registers and links are first-in first-out, so a count of fillings and a count of readings by each
consumer is their whole state. The scheduler plays the game to find an order, `sbp_core.check`
replays the order to prove it, and the reference runtime replays it with real tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from sbp_core.compile.physical import Actor, ActorKind, Channel, PhysicalPlan, Register
from sbp_core.graph.ir import Rate

#: Rank and name of an actor.
ActorId = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Wait:
    """Why an actor cannot fire: what it lacks, and the actor that would provide it."""

    reason: str
    on: ActorId


class TokenGame:
    """The marking of a plan within one step. A firing starts (takes) and finishes (gives)."""

    def __init__(self, plan: PhysicalPlan) -> None:
        self.plan = plan
        self.started: dict[ActorId, int] = defaultdict(int)
        self.finished: dict[ActorId, int] = defaultdict(int)
        self.sends: dict[ActorId, list[Channel]] = defaultdict(list)
        self.receives: dict[ActorId, list[Channel]] = defaultdict(list)
        for link in plan.links:
            self.sends[link.sender].append(link)
            self.receives[link.receiver].append(link)

    def actor(self, place: ActorId) -> Actor:
        """Return the actor at (rank, name)."""
        return self.plan.by_rank[place[0]].by_name[place[1]]

    def total(self, place: ActorId) -> int:
        """Return how often an actor fires in a step."""
        return self.actor(place).num_firings(self.plan.num_micro_batches)

    def is_done(self, place: ActorId) -> bool:
        """Whether an actor has started all its firings of the step."""
        return self.started[place] >= self.total(place)

    def filled(self, rank: int, register: Register) -> int:
        """Return how often a register has been filled."""
        producer = (rank, register.producer)
        count = self.finished[producer] + bool(register.carries)
        if register.rate is Rate.STEP and self.actor(producer).rate is Rate.MICRO:
            return count // self.plan.num_micro_batches
        return count

    def beside_states(self, rank: int, register: Register) -> int:
        """Return how many fillings of a register take memory that is not the states' own.

        The first filling of a register that carries states is the states themselves.
        """
        if not register.carries:
            return self.live(rank, register)
        read = min(self.finished[(rank, name)] for name in register.consumers)
        return self.finished[(rank, register.producer)] - max(0, read - 1)

    def live(self, rank: int, register: Register) -> int:
        """Return how many fillings of a register are alive."""
        read = min(self.finished[(rank, name)] for name in register.consumers)
        return self.filled(rank, register) - read

    def waits(self, place: ActorId) -> Iterator[Wait]:
        """Yield what keeps an actor from starting its next firing; nothing if it may start."""
        rank, name = place
        part = self.plan.by_rank[rank]
        index = self.started[place]
        for register in part.inputs_of[name]:
            if self.filled(rank, register) <= index:
                reason = f"waits for data in register {register.name}"
                yield Wait(reason, (rank, register.producer))
        for link in self.receives[place]:
            if self.finished[link.sender] <= index:
                yield Wait(f"waits for data on link {link.name}", link.sender)
        for register in part.outputs_of[name]:
            if not self._fills(place, register):
                continue
            fillings = index + bool(register.carries) if register.rate is Rate.MICRO else 0
            for consumer in register.consumers:
                if fillings - self.finished[(rank, consumer)] >= register.quota:
                    reason = f"waits for credit of register {register.name} ({register.quota})"
                    yield Wait(reason, (rank, consumer))
        for link in self.sends[place]:
            if index - self.finished[link.receiver] >= link.quota:
                reason = f"waits for credit of link {link.name} ({link.quota})"
                yield Wait(reason, link.receiver)

    def _fills(self, place: ActorId, register: Register) -> bool:
        """Whether the next firing fills a register: sums are filled by the last one only."""
        if register.rate is Rate.MICRO or self.actor(place).rate is Rate.STEP:
            return True
        return self.started[place] == self.plan.num_micro_batches - 1

    def is_ready(self, place: ActorId) -> bool:
        """Whether an actor has all data and credits for its next firing."""
        return not self.is_done(place) and next(self.waits(place), None) is None

    def start(self, place: ActorId) -> int:
        """Take the credits of a firing and return its index."""
        index = self.started[place]
        self.started[place] += 1
        return index

    def finish(self, place: ActorId) -> None:
        """Fill the outputs of a firing and give its inputs' credits back."""
        self.finished[place] += 1

    def neighbours(self, place: ActorId) -> set[ActorId]:
        """Return the places that a finished firing may have made ready, itself among them."""
        rank, name = place
        part = self.plan.by_rank[rank]
        found = {place}
        found.update((rank, reader) for r in part.outputs_of[name] for reader in r.consumers)
        found.update((rank, register.producer) for register in part.inputs_of[name])
        found.update(link.receiver for link in self.sends[place])
        found.update(link.sender for link in self.receives[place])
        return found

    def partners(self, place: ActorId) -> tuple[ActorId, ...]:
        """Return the places that fire together: the group of a collective, else the place alone."""
        actor = self.actor(place)
        if actor.kind is not ActorKind.COLLECTIVE:
            return (place,)
        step = self.plan.steps[actor.step]
        return tuple((rank, actor.name) for rank in step.group(place[0]))
