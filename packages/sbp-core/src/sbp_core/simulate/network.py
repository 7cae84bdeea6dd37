"""The firings of one step as a network, and its play in simulated time.

    firing of            waits for the end of
    actor f, its n-th    the firing before it in its thread's order          (its thread is free)
                         the firings that fill what it reads for the n-th time           (data)
                         the firings that read what must leave a full register or link  (credit)
    all of a group       what any of them waits for                         (boxing is together)

Registers and links are first-in first-out, so their counts (`sbp_core.compile.token_game`) say
which firing that is: who waits for whom does not depend on time, and is found once. Time alone
decides what goes first over the links of a rank, where flights follow one another in the order in
which their threads begin them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from sbp_core.compile.physical import Actor, ActorId, PhysicalPlan
from sbp_core.compile.token_game import TokenGame
from sbp_core.errors import PlanError
from sbp_core.graph.ir import Rate
from sbp_core.simulate.simulation import Simulation


class FiringNetwork:
    """A plan's step, ready to be played with its own times or with others.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
    """

    def __init__(self, plan: PhysicalPlan) -> None:
        self._game = TokenGame(plan)
        self._micro_batches = plan.num_micro_batches
        self._actors = {(part.rank, one.name): one for part in plan.ranks for one in part.actors}
        # Firings by number. `_index` numbers them by the least of those that fire together.
        self._groups: list[tuple[tuple[ActorId, ...], int]] = []
        self._index: dict[tuple[ActorId, int], int] = {}
        self._orders = {
            (part.rank, thread): self._numbered(part.rank, order)
            for part in plan.ranks
            for thread, order in part.orders.items()
        }
        # After each firing: who waits for its thread, who for what it makes or gives back.
        self._after_thread: list[list[int]] = [[] for _ in self._groups]
        self._after_end: list[list[int]] = [[] for _ in self._groups]
        self._num_waits = [0] * len(self._groups)
        for order in self._orders.values():
            for (_, _, before), (_, _, after) in pairwise(order):
                self._after_thread[before].append(after)
                self._num_waits[after] += 1
        for number, (partners, index) in enumerate(self._groups):
            for actor_id in partners:
                for other, which in self._needs(actor_id, index):
                    before = self._index.get((self._game.partners(other)[0], which), -1)
                    self._num_waits[number] += 1
                    if before >= 0:  # else nobody does it: it stands still
                        self._after_end[before].append(number)

    def _numbered(
        self, rank: int, order: Sequence[tuple[str, int]]
    ) -> list[tuple[Actor, int, int]]:
        """Return a thread's order as actors, which firing of theirs it is, and its number."""
        counts: dict[str, int] = {}
        found = []
        for name, _ in order:
            which = counts[name] = counts.get(name, -1) + 1
            partners = self._game.partners((rank, name))
            key = partners[0], which
            if key not in self._index:
                self._index[key] = len(self._groups)
                self._groups.append((partners, which))
            found.append((self._actors[rank, name], which, self._index[key]))
        return found

    def _needs(self, actor_id: ActorId, index: int) -> Iterator[tuple[ActorId, int]]:
        """Yield the firings, as (actor, which), whose ends an actor's firing waits for."""
        (rank, name), game = actor_id, self._game
        part, last = game.plan.by_rank[rank], self._micro_batches - 1
        for register in part.inputs_of[name]:
            producer = rank, register.producer
            filling = index - register.initial
            if register.rate is Rate.STEP and self._actors[producer].rate is Rate.MICRO:
                filling = filling * self._micro_batches + last  # the sum of all of them
            if filling >= 0:
                yield producer, filling
        for link in game.receives[actor_id]:
            yield link.sender, index
        for register in part.outputs_of[name]:
            # A register of rate step is filled once: nothing was there before.
            if register.rate is Rate.MICRO:
                reading = index + register.initial - register.quota
                if reading >= 0:
                    for consumer in register.consumers:
                        yield (rank, consumer), reading
        for link in game.sends[actor_id]:
            if index >= link.quota:
                yield link.receiver, index - link.quota

    def simulate(self, times_s: Mapping[ActorId, float] | None = None) -> Simulation:
        """Play the step.

        Args:
            times_s: Times of a firing of some actors, in seconds, in place of the plan's; of a
                group the slowest counts. The time to begin boxing that overlaps stays.

        Returns:
            When every firing was.

        Raises:
            PlanError: the plan stands still before the end of the step.
        """
        busy_s, rests_s = self._durations(times_s or {})
        count = len(self._groups)
        starts, frees, ends = [0.0] * count, [0.0] * count, [0.0] * count
        waits = self._num_waits.copy()
        links_free: dict[int, float] = {}
        done, now = 0, 0.0
        # Events: (when, number of a firing, whether it lands; else its threads are free). Of equal
        # times the plan's order decides, so every process finds the same.
        events = [(busy_s[i], i, False) for i, missing in enumerate(waits) if not missing]
        heapify(events)
        while events:
            now, number, lands = heappop(events)
            ready = []
            if not lands:
                frees[number] = now
                for after in self._after_thread[number]:
                    waits[after] -= 1
                    if not waits[after]:
                        ready.append(after)
                rest_s = rests_s[number]
                if rest_s:
                    # The links of all its ranks move one thing after the other.
                    ranks = [rank for rank, _ in self._groups[number][0]]
                    end = max(now, *(links_free.get(rank, 0.0) for rank in ranks)) + rest_s
                    links_free.update(dict.fromkeys(ranks, end))
                    heappush(events, (end, number, True))
                lands = not rest_s
            if lands:
                ends[number] = now
                done += 1
                for after in self._after_end[number]:
                    waits[after] -= 1
                    if not waits[after]:
                        ready.append(after)
            for after in ready:
                starts[after] = now
                heappush(events, (now + busy_s[after], after, False))
        if done < count:
            raise PlanError(
                f"the plan stands still: {count - done} of {count} firings never begin",
                todo="ask sbp_core.check for the cycle",
            )
        return Simulation(
            step_s=now,
            orders=self._orders,
            starts_s=starts,
            frees_s=frees,
            ends_s=ends,
        )

    def _durations(self, times_s: Mapping[ActorId, float]) -> tuple[list[float], list[float]]:
        """Return for each firing how long its threads are busy, and how long it goes on then."""
        known: dict[ActorId, tuple[float, float]] = {}
        for partners, _ in self._groups:
            if partners[0] not in known:
                # A collective is over on all ranks of its group at once.
                busy = max(_busy_s(self._actors[one], times_s.get(one)) for one in partners)
                whole = max(times_s.get(one, self._actors[one].time_s) for one in partners)
                known[partners[0]] = busy, max(0.0, whole - busy)
        durations = [known[partners[0]] for partners, _ in self._groups]
        return [busy for busy, _ in durations], [rest for _, rest in durations]


def _busy_s(actor: Actor, time_s: float | None) -> float:
    return actor.busy_s if time_s is None or actor.overlaps else time_s


def simulate(plan: PhysicalPlan) -> Simulation:
    """Play one step of a plan in the times that it predicts.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.

    Raises:
        PlanError: the plan stands still before the end of the step.
    """
    return FiringNetwork(plan).simulate()
