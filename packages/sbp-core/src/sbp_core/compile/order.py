"""Order firings: list scheduling of the token game gives every thread its fixed order.

Sends go first, since another rank waits for them, and updates between micro-batches, which the next
ones wait for; then forward firings, then older micro-batches, so the quotas alone decide the
schedule: as many as there are micro-batches give GPipe, `stages - stage` gives 1F1B. A strategy
that says the order of its actions is followed instead (`turns`). A collective starts on all ranks
of its group at once, hence in one order everywhere. What a rank receives only to report it, such as
the loss that another stage made, comes last of all that its thread does before the commit, so that
nothing else waits for it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sbp_core.compile.actors import Actor, ActorId, Send
from sbp_core.compile.dataflow import downstream, rank_successors
from sbp_core.compile.network import waits_without_order
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.compile.symmetry import Folded, fold
from sbp_core.compile.token_game import TokenGame
from sbp_core.compile.turns import Turns, is_report
from sbp_core.errors import PlanError
from sbp_core.graph.ir import PHASE_ORDER, Phase, Rate
from sbp_core.pipeline import Action

ThreadId = tuple[int, str]


def order_firings(
    plan: PhysicalPlan, actions: Mapping[int, Sequence[Action]] | None = None
) -> PhysicalPlan:
    """Return the plan with a firing order for every thread.

    Args:
        plan: Without.
        actions: For each rank the order of its forward and backward work; without, the quotas
            decide.

    Raises:
        PlanError: the quotas admit no order; names the actors that wait, and larger quotas.
    """
    actions = actions or {}
    folded = fold(plan, {rank: tuple(order) for rank, order in actions.items()})
    orders = _Scheduler(plan, folded, actions).run()
    return replace(
        plan,
        ranks=tuple(
            replace(part, orders=orders[folded.stands_for[part.rank]]) for part in plan.ranks
        ),
    )


class _Scheduler:
    """An event simulation with predicted times; only the order that it finds is kept."""

    def __init__(
        self, whole: PhysicalPlan, folded: Folded, actions: Mapping[int, Sequence[Action]]
    ) -> None:
        self.whole, plan = whole, folded.plan
        self.game = TokenGame(plan, folded.stands_for)
        self.turns = {
            part.rank: Turns(part, actions.get(part.rank, ()), plan.num_micro_batches)
            for part in plan.ranks
        }
        self.has_turns = bool(actions)
        self.now = 0.0
        self.free: set[ThreadId] = set()
        #: What is received for the user alone, whose values no other actor takes.
        self.reports: set[ActorId] = set()
        #: These, and what waits for them, such as the commit.
        self.last: set[ActorId] = set()
        self.pending: dict[ThreadId, set[ActorId]] = defaultdict(set)
        #: What may start as far as its own data and credits go, with its priority; only a start
        #: takes that away.
        self.ready: dict[ThreadId, dict[ActorId, tuple[int, ...]]] = defaultdict(dict)
        self.rank_of: dict[ActorId, tuple[int, int, int]] = {}
        self.orders: dict[ThreadId, list[tuple[str, int]]] = defaultdict(list)
        for part in plan.ranks:
            for index, actor in enumerate(part.actors):
                actor_id = (part.rank, actor.name)
                self.pending[(part.rank, actor.thread)].add(actor_id)
                if is_report(actor):
                    self.reports.add(actor_id)
                # Other micro-batches wait for the parameters that an update makes in between.
                is_awaited = actor.phase is Phase.OPTIMIZER and actor.rate is not Rate.STEP
                first = is_awaited or isinstance(actor, Send)
                phase = -1 if first else PHASE_ORDER[actor.phase]
                self.rank_of[actor_id] = (_urgency(part, actor), phase, index)
            here = {name for rank, name in self.reports if rank == part.rank}
            late = downstream(rank_successors(part), here)
            self.last.update((part.rank, name) for name in late)
        self.free.update(self.pending)
        for actor_ids in self.pending.values():
            self._look_at(actor_ids)
        #: When threads become free, and firings are over: time, sequence, who, which of both.
        self.running: list[tuple[float, int, tuple[ActorId, ...], bool, bool]] = []
        #: When the link of each rank has moved all that has begun.
        self.link_free: dict[int, float] = defaultdict(float)
        self.sequence = 0

    def run(self) -> Mapping[int, Mapping[str, tuple[tuple[str, int], ...]]]:
        """Return the orders of the threads of each rank.

        Raises:
            PlanError: the quotas admit none.
        """
        while any(self.pending.values()) or self.running:
            self._start_what_can()
            if not self.running:
                self._start_out_of_turn()
            if not self.running:
                cycle, todo = waits_without_order(self.whole)
                raise PlanError(
                    "the quotas admit no firing order",
                    where=cycle or self._stuck(),
                    todo=todo or "raise in_flight of the stages named",
                )
            self.now = self.running[0][0]
            # All that ends at this time, before anything starts: else the first of equals would let
            # its neighbours go ahead of others with a better priority.
            while self.running and self.running[0][0] <= self.now:
                self._finish(*heapq.heappop(self.running)[2:])
        found: dict[int, dict[str, tuple[tuple[str, int], ...]]] = defaultdict(dict)
        for (rank, name), order in sorted(self.orders.items()):
            found[rank][name] = tuple(order)
        return found

    def _priority(self, actor_id: ActorId) -> tuple[int, int, int, int]:
        # Forward goes first whenever it has credit. With few credits it runs out of them, and
        # backward firings, which give them back, come in between:
        #
        #     quota 4 (GPipe)    f0 f1 f2 f3 b0 b1 b2 b3
        #     quota 2 (1F1B)     f0 f1 b0 f2 b1 f3 b2 b3      f2 lacks credit until b0 is through
        urgency, phase, index = self.rank_of[actor_id]
        started = self.game.started[actor_id]
        if self.has_turns:
            phase = self.turns[actor_id[0]].place(self.game.actor(actor_id), started)
        return urgency, phase, started, index

    def _is_on(self, actor_id: ActorId) -> bool:
        """Whether it is an actor's turn, by the order of actions."""
        actor, index = self.game.actor(actor_id), self.game.started[actor_id]
        return self.turns[actor_id[0]].is_on(actor, index)

    def _start_what_can(self) -> None:
        for thread in sorted(self.free):
            # A collective of a thread before took it.
            if thread in self.free:
                # The thread is busy then. A start makes nobody ready, so one pass over the threads
                # is enough.
                any(self._starts(actor_id) for actor_id in self._candidates(thread))

    def _start_out_of_turn(self) -> None:
        """Start what waits for nothing but its turn, the earliest of all threads first.

        Orders of actions say nothing of what a rank does for other stages beside, such as to send
        them a tied weight for their backward phase, which belongs to its own.
        """
        waiting = (c for thread in self.free for c in self._candidates(thread))
        ordered = sorted(waiting, key=lambda actor_id: (self._priority(actor_id)[1], actor_id))
        any(self._starts(actor_id, in_turn=False) for actor_id in ordered)

    def _candidates(self, thread: ThreadId) -> list[ActorId]:
        """Return what a thread could start, the best first."""
        # A greedy order would put a report into a gap before the thread's last firings, which
        # would wait for it if it came later than predicted.
        ready = self.ready[thread]
        found = sorted(ready, key=ready.__getitem__)
        if self.reports.isdisjoint(ready) or self.pending[thread] <= self.last:
            return found
        return [actor_id for actor_id in found if actor_id not in self.reports]

    def _starts(self, actor_id: ActorId, *, in_turn: bool = True) -> bool:
        """Start an actor if it can be; return whether it was."""
        # A collective starts only when every thread of its group is free and has it ready, and then
        # takes them all at once. So it comes in the same place between other collectives on all
        # ranks of the group; if each rank chose for itself, two ranks could begin two collectives
        # crosswise, and wait for each other for ever.
        partners = self.game.partners(actor_id)
        threads = [self._thread(partner) for partner in partners]
        are_ready = all(
            p in self.ready[t] and (self._is_on(p) or not in_turn)
            for p, t in zip(partners, threads, strict=True)
        )
        if not are_ready or not all(t in self.free for t in threads):
            return False
        self._start(partners, threads)
        return True

    def _look_at(self, actor_ids: Iterable[ActorId]) -> None:
        """Note which of some actors have become ready."""
        for actor_id in actor_ids:
            if self.game.is_ready(actor_id):
                self.ready[self._thread(actor_id)][actor_id] = self._priority(actor_id)

    def _thread(self, actor_id: ActorId) -> ThreadId:
        return actor_id[0], self.game.actor(actor_id).thread

    def _start(self, partners: tuple[ActorId, ...], threads: list[ThreadId]) -> None:
        for actor_id, thread in zip(partners, threads, strict=True):
            index = self.game.start(actor_id)
            self.turns[actor_id[0]].start(self.game.actor(actor_id), index)
            self.ready[thread].pop(actor_id, None)
            self.orders[thread].append((actor_id[1], index))
            self.free.discard(thread)
            if self.game.is_done(actor_id):
                self.pending[thread].discard(actor_id)
        actors = [self.game.actor(actor_id) for actor_id in partners]
        end = self.now + max(actor.time_s for actor in actors)
        if not any(actor.overlaps for actor in actors):
            self._push(end, partners, frees=True, ends=True)
            return
        # The threads go on when it has begun. It is over when the links of all its ranks have moved
        # it, one thing after the other.
        begun = self.now + max(actor.begun_s for actor in actors)
        end += max(0.0, max(self.link_free[rank] for rank, _ in partners) - begun)
        for rank, _ in partners:
            self.link_free[rank] = end
        free = self.now + max(actor.busy_s for actor in actors)
        self._push(free, partners, frees=True, ends=False)
        self._push(end, partners, frees=False, ends=True)

    def _push(
        self, when: float, actor_ids: tuple[ActorId, ...], *, frees: bool, ends: bool
    ) -> None:
        self.sequence += 1
        heapq.heappush(self.running, (when, self.sequence, actor_ids, frees, ends))

    def _finish(self, actor_ids: tuple[ActorId, ...], frees: bool, ends: bool) -> None:
        if frees:
            self.free.update(map(self._thread, actor_ids))
        if not ends:
            return
        for actor_id in actor_ids:
            self.game.finish(actor_id)
        for actor_id in actor_ids:
            self._look_at(self.game.neighbours(actor_id))

    def _stuck(self) -> list[str]:
        lines = []
        for actor_ids in self.pending.values():
            for actor_id in sorted(actor_ids, key=lambda actor_id: self.rank_of[actor_id][2]):
                wait = next(self.game.waits(actor_id), None)
                if wait is not None:
                    lines.append(f"rank {actor_id[0]}: {actor_id[1]} {wait.reason}")
        return lines[:12]


def _urgency(part: RankPlan, actor: Actor) -> int:
    """Return who goes first: what other ranks wait for, then what goes on beside the thread."""
    if isinstance(actor, Send):
        return 0
    return 1 if _is_begun_early(actor) or _leads(part, actor) else 2


def _is_begun_early(actor: Actor) -> bool:
    """Whether an actor lets something go on beside its thread, for which it goes first.

    An update that only reads states could begin with the step, and would hold memory all along.
    """
    return actor.overlaps and (bool(actor.inputs) or actor.phase is not Phase.OPTIMIZER)


def _leads(part: RankPlan, actor: Actor) -> bool:
    """Whether an actor only makes of states what such a collective takes, such as a bucket."""
    registers = part.outputs_of[actor.name]
    readers = [name for register in registers if register.keys for name in register.consumers]
    made_of_states = not actor.inputs and bool(readers)
    return made_of_states and all(_is_begun_early(part.by_name[name]) for name in readers)
