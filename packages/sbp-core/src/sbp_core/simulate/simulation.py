"""What a simulation finds: when each firing of a step was, and how busy every thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp_core.compile.actors import Actor


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFiring:
    """One firing of one actor, on the clock of the step, in seconds.

        thread   | begin ---- |  next firing ...
        link                  | flight ------- |
                 ^ start_s    ^ free_s         ^ end_s

    Args:
        rank: Where it fires.
        actor: What the plan says of who fires.
        index: Which of the actor's firings in the step, from 0.
        start_s: When its thread begins with it.
        free_s: When its thread is free again.
        end_s: When what it makes is there; later than `free_s` of boxing that overlaps.
    """

    rank: int
    actor: Actor
    index: int
    start_s: float
    free_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step in simulated time.

    Args:
        step_s: When the last firing is over, in seconds.
        orders: For each (rank, thread) its firings in order: the actor, which of its firings it is,
            and the number of the firing in the network, where those of a group have the same one.
        starts_s, frees_s, ends_s: Times by that number.
    """

    step_s: float
    orders: Mapping[tuple[int, str], Sequence[tuple[Actor, int, int]]]
    starts_s: Sequence[float]
    frees_s: Sequence[float]
    ends_s: Sequence[float]

    @cached_property
    def firings(self) -> tuple[TimedFiring, ...]:
        """All firings, by rank, thread and the order there."""
        return tuple(
            TimedFiring(
                rank=rank,
                actor=actor,
                index=index,
                start_s=self.starts_s[number],
                free_s=self.frees_s[number],
                end_s=self.ends_s[number],
            )
            for (rank, _), order in self.orders.items()
            for actor, index, number in order
        )

    @cached_property
    def busy_s(self) -> dict[tuple[int, str], float]:
        """For each (rank, thread) the seconds in which it fires; the rest of the step it idles."""
        return {
            thread: sum(self.frees_s[number] - self.starts_s[number] for _, _, number in order)
            for thread, order in self.orders.items()
        }
