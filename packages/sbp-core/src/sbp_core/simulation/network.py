"""Simulate the time of a plan's training step, once or repeatedly while a search changes the plan.

A firing is one execution of an actor, a segment of operators or a communication step.
`sbp_core.compile.plan_network` gives the dependencies within one step. The step's time is the
latency of that network, and each firing begins when the last of its dependencies has ended. The
network has one rank of each class of equal ranks (`sbp_core.compile.symmetry`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from sbp_core.compile.actors import Actor, ActorId
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.plan_network import Orders, PlanNetwork, tokens_of
from sbp_core.compile.symmetry import fold
from sbp_core.dataflow import EarliestStarts, FlowEdge, expand, waited_for
from sbp_core.errors import PlanError

_Wait = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFiring:
    """One firing of one actor, on the clock of the step, in seconds.

        thread   | begin ---- |  next firing ...
        link                  | flight ------- |
                 ^ start_s    ^ free_s         ^ end_s

    Args:
        rank: The rank.
        actor: The actor in the plan.
        index: The number of the actor's firing in the step, from 0.
        start_s: The time at which its thread begins it.
        free_s: The time at which its thread is free again.
        end_s: The time at which its result is available; later than `free_s` if boxing overlaps.
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
        step_s: The end of the last firing, in seconds.
        orders: For each (rank, thread) its firings in order: the actor, the index of the firing,
            and the number of the firing in the network, which all firings of a group share.
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


class FiringNetwork:
    """A plan's step, which can be changed and timed again.

    Args:
        plan: A plan with firing orders that `sbp_core.check` accepts.

    Raises:
        PlanError: the plan deadlocks before the end of the step.
    """

    def __init__(self, plan: PhysicalPlan) -> None:
        self._plan, self._folded = plan, fold(plan)
        self._made = PlanNetwork(self._folded)
        network = self._made.network
        self._edges = {edge.name: edge for edge in network.edges}
        self._orders: dict[int, Orders] = {
            part.rank: part.orders for part in self._folded.plan.ranks
        }
        expansion = expand(network)
        self._counts, self._first = expansion.counts, expansion.first
        self._duration_s = [float(time_s) for time_s in expansion.duration_s]
        self._starts = EarliestStarts(expansion)
        if not self._starts.is_live:
            raise PlanError(
                "the plan deadlocks before the end of the step",
                todo="ask sbp_core.check for the cycle",
            )

    @property
    def step_s(self) -> float:
        """The end of the last firing, in seconds."""
        return float(self._starts.end_s)

    def simulate(self) -> Simulation:
        """Return the times of every firing."""
        starts_s = [float(time_s) for time_s in self._starts.start_s]
        frees_s = [start + busy for start, busy in zip(starts_s, self._duration_s, strict=True)]
        ends_s = frees_s.copy()
        for end in self._made.ends.values():
            if end.over != end.begin:
                for index in range(self._counts[end.begin]):
                    ends_s[self._first[end.begin] + index] = frees_s[self._first[end.over] + index]
        orders = {
            (rank, thread): self._numbered(rank, order)
            for rank, threads in self._orders.items()
            for thread, order in threads.items()
        }
        stands_for = self._folded.stands_for
        return Simulation(
            step_s=self.step_s,
            orders={
                (part.rank, thread): orders[stands_for[part.rank], thread]
                for part in self._plan.ranks
                for thread in part.orders
            },
            starts_s=starts_s,
            frees_s=frees_s,
            ends_s=ends_s,
        )

    def change(
        self,
        *,
        quotas: Mapping[tuple[int, str], int] | None = None,
        link_quotas: Mapping[ActorId, int] | None = None,
        orders: Mapping[int, Orders] | None = None,
    ) -> bool:
        """Change quotas or orders, and update the times of the affected firings.

        A change for a rank applies to all ranks that do the same. Nothing else of the plan changes:
        the reverse change restores it.

        Args:
            quotas: Quotas of registers, by (rank, name).
            link_quotas: The quota of all links that an actor sends on.
            orders: For each rank the firings of all its threads.

        Returns:
            Whether the step still comes to its end; if not, nothing is changed.

        Raises:
            PlanError: an order has other firings than before.
        """
        rank_of = self._folded.stands_for
        edges = {
            name: replace(edge, quota=tokens_of(quota, edge.produced, edge.consumed))
            for found, changed in (
                (self._made.registers, quotas or {}),
                (self._made.links, link_quotas or {}),
            )
            for (rank, of), quota in changed.items()
            for name in found[rank_of[rank], of]
            for edge in (self._edges[name],)
        }
        ranks = {rank_of[rank]: order for rank, order in (orders or {}).items()}
        for rank, order in ranks.items():
            _check_orders(rank, self._orders[rank], order)
        # A firing may wait for another one for several reasons; one of them is removed.
        before = Counter(wait for name in edges for wait in self._credits(self._edges[name]))
        before.update(wait for rank in ranks for wait in self._turns(rank, self._orders[rank]))
        after = Counter(wait for edge in edges.values() for wait in self._credits(edge))
        after.update(wait for rank, order in ranks.items() for wait in self._turns(rank, order))
        removed, added = (before - after).elements(), (after - before).elements()
        if not self._starts.change(tuple(removed), tuple(added)):
            return False
        self._edges |= edges
        self._orders |= ranks
        return True

    def _numbered(
        self, rank: int, order: Sequence[tuple[str, int]]
    ) -> list[tuple[Actor, int, int]]:
        """Return a thread's order as actors, the index of each firing, and its number."""
        by_name, ends = self._plan.by_rank[rank].by_name, self._made.ends
        return [
            (by_name[name], index, self._first[ends[rank, name].begin] + index)
            for name, index in order
        ]

    def _credits(self, edge: FlowEdge) -> Iterator[_Wait]:
        """Yield the waits of an edge's producer for places, within the step."""
        assert edge.quota is not None, "only edges with a quota are changed"
        consumer, producer = self._first[edge.consumer], self._first[edge.producer]
        counts = self._counts[edge.consumer], self._counts[edge.producer]
        free = edge.quota - edge.initial
        for index, (number, steps) in enumerate(
            waited_for(*counts, edge.consumed, edge.produced, free)
        ):
            if not steps:
                yield consumer + number, producer + index

    def _turns(self, rank: int, orders: Orders) -> Iterator[_Wait]:
        """Yield the waits of firings for the previous ones on threads and links of a rank."""
        for order in self._made.orders_of(rank, orders).values():
            yield from pairwise(self._first[name] + index for name, index in order)


def _check_orders(rank: int, before: Orders, after: Orders) -> None:
    counts = [
        {thread: Counter(name for name, _ in order) for thread, order in orders.items()}
        for orders in (before, after)
    ]
    seen: Counter[str] = Counter()
    for name, index in (firing for order in after.values() for firing in order):
        if index != seen[name] or counts[0] != counts[1]:
            raise PlanError(
                "an order has other firings than before, or some that are not in turn",
                where=f"the orders of rank {rank}, at firing {index} of {name!r}",
                accepted="each firing of the actors of each thread once, in turn",
            )
        seen[name] += 1


def simulate(plan: PhysicalPlan) -> Simulation:
    """Simulate one step of a plan with its predicted times.

    Args:
        plan: A plan with firing orders that `sbp_core.check` accepts.

    Raises:
        PlanError: the plan deadlocks before the end of the step.
    """
    return FiringNetwork(plan).simulate()
