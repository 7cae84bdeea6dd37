"""Order firings: list scheduling of the token game gives every thread its fixed order.

Sends go first, since another rank waits for them; then forward firings, then older micro-batches,
so the quotas alone decide the schedule: as many as there are micro-batches give GPipe, `stages -
stage` gives 1F1B. A collective starts on all ranks of its group at once, hence in one order
everywhere.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from sbp_core.compile.firings import ThreadId
from sbp_core.compile.physical import ActorKind, PhysicalPlan
from sbp_core.compile.token_game import ActorId, TokenGame
from sbp_core.errors import PlanError
from sbp_core.graph.ir import PHASE_ORDER


def order_firings(plan: PhysicalPlan) -> PhysicalPlan:
    """Return the plan with a firing order for every thread.

    Raises:
        PlanError: the quotas admit no order; names the actors that wait.
    """
    return _Scheduler(plan).run()


class _Scheduler:
    """An event simulation with rough times; only the order that it finds is kept."""

    def __init__(self, plan: PhysicalPlan) -> None:
        self.plan = plan
        self.game = TokenGame(plan)
        self.now = 0.0
        self.free: set[ThreadId] = set()
        self.pending: dict[ThreadId, set[ActorId]] = defaultdict(set)
        #: What may start as far as its own data and credits go; only a start takes that away.
        self.ready: dict[ThreadId, set[ActorId]] = defaultdict(set)
        self.rank_of: dict[ActorId, tuple[int, int]] = {}
        self.orders: dict[ThreadId, list[tuple[str, int]]] = defaultdict(list)
        for part in plan.ranks:
            for index, actor in enumerate(part.actors):
                place = (part.rank, actor.name)
                self.pending[(part.rank, actor.thread)].add(place)
                sends = actor.kind is ActorKind.SEND
                self.rank_of[place] = (-1 if sends else PHASE_ORDER[actor.phase], index)
        self.free.update(self.pending)
        for places in self.pending.values():
            self._look_at(places)
        self.running: list[tuple[float, int, tuple[ActorId, ...]]] = []
        self.sequence = 0

    def run(self) -> PhysicalPlan:
        while any(self.pending.values()) or self.running:
            self._start_what_can()
            if not self.running:
                raise PlanError(
                    "the quotas admit no firing order",
                    where=self._stuck(),
                    todo="raise in_flight of the stages named",
                )
            self.now, _, places = heapq.heappop(self.running)
            self._finish(places)
            while self.running and self.running[0][0] <= self.now:
                self._finish(heapq.heappop(self.running)[2])
        return replace(
            self.plan,
            ranks=tuple(
                replace(
                    part,
                    orders={
                        name: tuple(order)
                        for (rank, name), order in sorted(self.orders.items())
                        if rank == part.rank
                    },
                )
                for part in self.plan.ranks
            ),
        )

    def _priority(self, place: ActorId) -> tuple[int, int, int]:
        phase, index = self.rank_of[place]
        return phase, self.game.started[place], index

    def _start_what_can(self) -> None:
        for thread in sorted(self.free):
            if thread not in self.free:
                continue
            for place in sorted(self.ready[thread], key=self._priority):
                partners = self.game.partners(place)
                threads = [self._thread(partner) for partner in partners]
                are_ready = all(p in self.ready[t] for p, t in zip(partners, threads, strict=True))
                if are_ready and all(t in self.free for t in threads):
                    self._start(partners, threads)
                    break

    def _look_at(self, places: Iterable[ActorId]) -> None:
        """Note which of some places have become ready."""
        for place in places:
            if self.game.is_ready(place):
                self.ready[self._thread(place)].add(place)

    def _thread(self, place: ActorId) -> ThreadId:
        return place[0], self.game.actor(place).thread

    def _start(self, partners: tuple[ActorId, ...], threads: list[ThreadId]) -> None:
        for place, thread in zip(partners, threads, strict=True):
            index = self.game.start(place)
            self.ready[thread].discard(place)
            self.orders[thread].append((place[1], index))
            self.free.discard(thread)
            if self.game.is_done(place):
                self.pending[thread].discard(place)
        self.sequence += 1
        end = self.now + max(self.game.actor(place).weight_s for place in partners)
        heapq.heappush(self.running, (end, self.sequence, partners))

    def _finish(self, places: tuple[ActorId, ...]) -> None:
        for place in places:
            self.game.finish(place)
            self.free.add(self._thread(place))
        for place in places:
            self._look_at(self.game.neighbours(place))

    def _stuck(self) -> list[str]:
        lines = []
        for places in self.pending.values():
            for place in sorted(places, key=lambda place: self.rank_of[place][1]):
                wait = next(self.game.waits(place), None)
                if wait is not None:
                    lines.append(f"rank {place[0]}: {place[1]} {wait.reason}")
        return lines[:12]
