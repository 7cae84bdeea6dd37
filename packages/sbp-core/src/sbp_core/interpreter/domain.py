"""`Domain`: an interface for the values of a plan's replay, and for the work of its actors on them.

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
    """One firing (execution) of an actor.

    Args:
        rank: The rank of the actor.
        actor: The actor.
        index: The number of the firing in the step: its micro-batch.
    """

    rank: int
    actor: A_co
    index: int

    @property
    def id(self) -> ActorId:
        """Identifies the actor among the actors of all ranks."""
        return self.rank, self.actor.name


def is_firing_of(firing: Firing[Actor], kind: type[A_co]) -> TypeGuard[Firing[A_co]]:
    """Whether a firing is of an actor of a kind."""
    return isinstance(firing.actor, kind)


class Domain(ABC, Generic[V]):
    """The kind of values of a replay.

    The first methods do the work of firings. They return values to the interpreter, which holds and
    drops them, and reports that by the other methods: a value lives as long as it is held or kept.
    """

    def duration(self, actor_id: ActorId) -> float:
        """Return the time of a firing on its thread, in any unit; 0 orders low ranks first."""
        return 0.0

    # The work of firings.

    @abstractmethod
    def compute(self, firing: Firing[Compute], taken: Values[V]) -> Values[V]:
        """Return the results of a compute segment by key: at least those that leave it.

        Args:
            firing: The firing of a compute segment.
            taken: Its inputs, held; inputs that the method does not return are dropped here.
        """

    @abstractmethod
    def collective(
        self, firings: Sequence[Firing[Collective]], shards: Mapping[int, V]
    ) -> Mapping[int, V]:
        """Return each rank's result of a collective.

        Args:
            firings: The firings of all ranks of a group, in its order.
            shards: The input of each rank.
        """

    def send(self, firing: Firing[Send], shard: V) -> None:
        """Do the work of a sender; the interpreter puts the shard on the channels."""

    @abstractmethod
    def receive(self, firing: Firing[Receive], shards: Mapping[int, V]) -> V:
        """Return a receiver's part, made of the shards of the senders, by rank."""

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
            firing: The firing of an accumulation.
            term: One of its `accumulates`: the keys of part and sum, and how they are added.
            total: The sum so far, which may be overwritten; None in the first micro-batch.
            part: The part of this micro-batch.
        """

    # Reports of the interpreter about values.

    def hold(self, rank: int, value: V) -> None:
        """Note that a firing holds a value."""

    def keep(self, rank: int, value: V) -> None:
        """Note that a value is held for other firings: in a register, on a channel, as a sum."""

    def drop(self, rank: int, value: V) -> None:
        """Note that one holder of a value, by `hold` or `keep`, drops it."""

    def emit(self, firing: Firing[Actor], result: str, value: V) -> None:
        """Note a loss or metric; if an actor fires several times, the last value counts."""

    def write(self, firing: Firing[Actor], state: str, value: V) -> None:
        """Note the new value of a state; if an actor fires several times, the last value counts."""

    def fired(self, firing: Firing[Actor], game: TokenGame) -> None:
        """Note that a firing has ended; `game` has the counts after it."""


class InstructionDomain(Domain[V]):
    """A domain in which segments are executed one instruction after the other."""

    def __init__(self) -> None:
        self._dying: dict[ActorId, tuple[tuple[str, ...], ...]] = {}

    @abstractmethod
    def call(
        self, firing: Firing[Compute], instruction: Instruction, values: Values[V]
    ) -> Sequence[V]:
        """Return the results of an instruction, in the order of its outputs.

        Args:
            firing: The firing of the segment.
            instruction: An instruction of the segment.
            values: The present values by key.
        """

    def compute(self, firing: Firing[Compute], taken: Values[V]) -> Values[V]:
        """Execute the instructions; each value dies after its last use, including the inputs.

        No variable of this frame may refer to a value while an instruction runs: a tensor would
        live longer than it does in a run.
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
