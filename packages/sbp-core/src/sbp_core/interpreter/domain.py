"""The abstract domain of the interpreter: what a value is, and what an actor of each kind makes.

A value is a token, a storage or a tensor: the checker, the prediction of memory and the reference
runtime replay the same steps, and differ in their domains only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeGuard, TypeVar

from sbp_core.compile.actors import (
    Accumulate,
    Actor,
    ActorId,
    Collective,
    Compute,
    Instruction,
    Receive,
    Send,
    dying_keys,
)
from sbp_core.compile.token_game import TokenGame

V = TypeVar("V")

#: Values by key.
Values = dict[str, V]


#: A kind of actor.
A_co = TypeVar("A_co", bound=Actor, covariant=True)


@dataclass(frozen=True, slots=True)
class Firing(Generic[A_co]):
    """One firing of an actor.

    Args:
        rank: Whose.
        actor: What fires.
        index: Which firing of the actor in the step: its micro-batch.
    """

    rank: int
    actor: A_co
    index: int

    @property
    def id(self) -> ActorId:
        """Name the actor among those of all ranks."""
        return self.rank, self.actor.name


def is_firing_of(firing: Firing[Actor], kind: type[A_co]) -> TypeGuard[Firing[A_co]]:
    """Whether a firing is of an actor of a kind."""
    return isinstance(firing.actor, kind)


class Domain(ABC, Generic[V]):
    """What the values of a replay are.

    The first methods do the work of firings. Whatever they return is handed over to the
    interpreter, which holds it, drops it, and says so by the methods after them: a value lives as
    long as it is held or kept by somebody.
    """

    def duration(self, actor_id: ActorId) -> float:
        """Return how long a firing keeps its thread busy, in any unit; 0 orders low ranks first."""
        return 0.0

    # The work of firings.

    @abstractmethod
    def compute(self, firing: Firing[Compute], taken: Values[V]) -> Values[V]:
        """Return what a compute segment makes, by key: at least what leaves it.

        Args:
            firing: Of a compute segment.
            taken: What it takes and reads, held; what the segment does not return is dropped here.
        """

    @abstractmethod
    def collective(
        self, firings: Sequence[Firing[Collective]], shards: Mapping[int, V]
    ) -> Mapping[int, V]:
        """Return each rank's part of what a collective makes.

        Args:
            firings: Of all ranks of a group, in its order.
            shards: What each rank has before.
        """

    def send(self, firing: Firing[Send], shard: V) -> None:
        """Do what a sender does; the interpreter puts the shard onto the channels."""

    @abstractmethod
    def receive(self, firing: Firing[Receive], shards: Mapping[int, V]) -> V:
        """Return a receiver's part, made of what each sender sent, by rank."""

    @abstractmethod
    def add(
        self,
        firing: Firing[Accumulate],
        term: tuple[str, str, float | str | None],
        total: V | None,
        part: V,
    ) -> V:
        """Return the sum of a step so far, with the part of one more micro-batch.

        Args:
            firing: Of an accumulation.
            term: One of its `accumulates`: the keys of part and sum, and how they are added.
            total: The sum so far, which may be written over; None in the first micro-batch.
            part: Of this micro-batch.
        """

    # What the interpreter says of values.

    def hold(self, rank: int, value: V) -> None:
        """Note that a firing holds a value."""

    def keep(self, rank: int, value: V) -> None:
        """Note that a value is held for other firings: in a register, on a channel, as a sum."""

    def drop(self, rank: int, value: V) -> None:
        """Note that somebody who held or kept a value does so no longer."""

    def emit(self, firing: Firing[Actor], result: str, value: V) -> None:
        """Note a loss or metric; of an actor that fires several times, the last one counts."""

    def write(self, firing: Firing[Actor], state: str, value: V) -> None:
        """Note the new value of a state; of an actor that fires several times, the last counts."""

    def fired(self, firing: Firing[Actor], game: TokenGame) -> None:
        """Note that a firing is over, and how the counts are after it."""


class InstructionDomain(Domain[V]):
    """A domain in which segments are executed one instruction after the other."""

    def __init__(self) -> None:
        self._dying: dict[ActorId, tuple[tuple[str, ...], ...]] = {}

    @abstractmethod
    def call(
        self, firing: Firing[Compute], instruction: Instruction, values: Values[V]
    ) -> Sequence[V]:
        """Return what an instruction makes, in the order of its outputs.

        Args:
            firing: Of the segment.
            instruction: Of the segment.
            values: What is there, by key.
        """

    def compute(self, firing: Firing[Compute], taken: Values[V]) -> Values[V]:
        """Execute the instructions; each value dies after its last use, those taken too.

        No name of this frame may stand for a value while an instruction runs: a tensor would live
        longer than it does in a run.
        """
        rank, actor = firing.rank, firing.actor
        if firing.id not in self._dying:
            self._dying[firing.id] = dying_keys(actor)
        for instruction, dying in zip(actor.instructions, self._dying[firing.id], strict=True):
            taken |= zip(instruction.outputs, self.call(firing, instruction, taken), strict=True)
            for key in instruction.outputs:
                self.hold(rank, taken[key])
            for key in dying:
                self.drop(rank, taken.pop(key))
        return taken
