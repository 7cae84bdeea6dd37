"""Give every thread of a plan the fixed order in which it executes (fires) its actors.

This is the last step of the compiler: list scheduling, as the token game (`token_game`) allows.
Sends go first, because another rank waits for them; then updates between micro-batches, because the
next micro-batches wait for them; then forward firings, then older micro-batches. So the quotas
alone decide the schedule: a quota of all micro-batches gives GPipe, `stages - stage` gives 1F1B. If
a strategy gives the order of its actions, that order is followed instead (`Turns`). A collective
starts on all ranks of its group at once, hence in one order everywhere. A value that a rank
receives only to report it, such as the loss of another stage, comes after all other work of its
thread before the commit, so that nothing waits for it. A thread may post its receives ahead of that
order (`early_receives`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sbp_core.compile.actors import Actor, ActorId, Receive, Send
from sbp_core.compile.dataflow import downstream, rank_successors
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.compile.plan_network import waits_without_order
from sbp_core.compile.symmetry import FoldedPlan, fold
from sbp_core.compile.token_game import TokenGame
from sbp_core.errors import PlanError
from sbp_core.graph.ir import PHASE_ORDER, Phase, Rate
from sbp_core.pipeline import Action, ActionKind

ThreadId = tuple[int, str]


def order_firings(
    plan: PhysicalPlan, actions: Mapping[int, Sequence[Action]] | None = None
) -> PhysicalPlan:
    """Return the plan with a firing order for every thread.

    Args:
        plan: A plan without firing orders.
        actions: For each rank the order of its forward and backward work; without it, the quotas
            decide.

    Raises:
        PlanError: the quotas allow no order; names the actors that wait, and larger quotas.
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
    """An event simulation with predicted times; only the resulting order is kept."""

    def __init__(
        self, whole: PhysicalPlan, folded: FoldedPlan, actions: Mapping[int, Sequence[Action]]
    ) -> None:
        self.whole, plan = whole, folded.plan
        self.game = TokenGame(plan, folded.stands_for)
        self.turns = {
            part.rank: Turns(part, actions.get(part.rank, ()), plan.num_micro_batches)
            for part in plan.ranks
        }
        self.has_turns = bool(actions)
        self.now = 0.0
        #: Receives of values for the user alone, which no other actor takes.
        self.reports: set[ActorId] = set()
        #: These receives, and all actors that wait for them, such as the commit.
        self.last: set[ActorId] = set()
        self.pending: dict[ThreadId, set[ActorId]] = defaultdict(set)
        #: Actors whose own data and credits let them start, with their priority; only their start
        #: changes that.
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
        self.free: set[ThreadId] = set(self.pending)
        for actor_ids in self.pending.values():
            self._look_at(actor_ids)
        #: When threads become free, and firings end: time, sequence, who, which of both.
        self.running: list[tuple[float, int, tuple[ActorId, ...], bool, bool]] = []
        #: When the link of each rank has finished all transfers that have begun.
        self.link_free: dict[int, float] = defaultdict(float)
        self.sequence = 0

    def run(self) -> Mapping[int, Mapping[str, tuple[tuple[str, int], ...]]]:
        """Return the orders of the threads of each rank.

        Raises:
            PlanError: the quotas allow none.
        """
        while any(self.pending.values()) or self.running:
            for thread in sorted(self.free):
                # A collective on an earlier thread has already started it.
                if thread in self.free:
                    # The thread is busy then. A start makes nobody ready, so one pass over the
                    # threads is enough.
                    any(self._starts(actor_id) for actor_id in self._candidates(thread))
            if not self.running:
                # Actors that wait only for their turn, the earliest of all threads first. Orders of
                # actions do not include a rank's work for other stages, such as sending a tied
                # weight for their backward phase, which belongs to its own.
                waiting = (c for thread in self.free for c in self._candidates(thread))
                ordered = sorted(
                    waiting, key=lambda actor_id: (self._priority(actor_id)[1], actor_id)
                )
                any(self._starts(actor_id, in_turn=False) for actor_id in ordered)
            if not self.running:
                cycle, todo = waits_without_order(self.whole)
                raise PlanError(
                    "the quotas admit no firing order",
                    where=cycle or self._stuck(),
                    todo=todo or "raise in_flight of the stages named",
                )
            self.now = self.running[0][0]
            # Process all ends at this time before anything starts: otherwise the first of several
            # would let its neighbours go ahead of actors with a better priority.
            while self.running and self.running[0][0] <= self.now:
                _, _, actor_ids, frees, ends = heapq.heappop(self.running)
                self.free.update(self._thread(actor_id) for actor_id in actor_ids if frees)
                for actor_id in actor_ids if ends else ():
                    self.game.finish(actor_id)
                for actor_id in actor_ids if ends else ():
                    self._look_at(self.game.neighbours(actor_id))
        found: dict[int, dict[str, tuple[tuple[str, int], ...]]] = defaultdict(dict)
        for (rank, name), order in sorted(self.orders.items()):
            found[rank][name] = tuple(order)
        return found

    def _priority(self, actor_id: ActorId) -> tuple[int, int, int, int]:
        # Forward goes first whenever it has credit. With few credits it runs out of them, and
        # backward firings, which give them back, come in between:
        #
        #     quota 4 (GPipe)    f0 f1 f2 f3 b0 b1 b2 b3
        #     quota 2 (1F1B)     f0 f1 b0 f2 b1 f3 b2 b3      f2 lacks credit until b0 has ended
        urgency, phase, index = self.rank_of[actor_id]
        started = self.game.started[actor_id]
        if self.has_turns:
            phase = self.turns[actor_id[0]].place(self.game.actor(actor_id), started)
        return urgency, phase, started, index

    def _candidates(self, thread: ThreadId) -> list[ActorId]:
        """Return the actors that a thread could start, the best first."""
        # A greedy order would put a report into a gap before the thread's last firings, which
        # would wait for it if it came later than predicted.
        ready = self.ready[thread]
        found = sorted(ready, key=ready.__getitem__)
        if self.reports.isdisjoint(ready) or self.pending[thread] <= self.last:
            return found
        return [actor_id for actor_id in found if actor_id not in self.reports]

    def _starts(self, actor_id: ActorId, *, in_turn: bool = True) -> bool:
        """Start an actor if possible; return whether it has started."""
        # A collective starts only when every thread of its group is free and has it ready, and then
        # takes them all at once. So it has the same place among other collectives on all ranks of
        # the group. If each rank chose separately, two ranks could begin two collectives in
        # opposite order, and wait for each other for ever.
        game, partners = self.game, self.game.partners(actor_id)
        threads = [self._thread(partner) for partner in partners]
        for one, thread in zip(partners, threads, strict=True):
            if thread not in self.free or one not in self.ready[thread]:
                return False
            if in_turn and not self.turns[one[0]].is_on(game.actor(one), game.started[one]):
                return False
        for one, thread in zip(partners, threads, strict=True):
            index = game.start(one)
            self.turns[one[0]].start(game.actor(one), index)
            self.ready[thread].pop(one, None)
            self.orders[thread].append((one[1], index))
            self.free.discard(thread)
            if game.is_done(one):
                self.pending[thread].discard(one)
        actors = [game.actor(one) for one in partners]
        end = self.now + max(actor.time_s for actor in actors)
        if not any(actor.overlaps for actor in actors):
            self._push(end, partners, frees=True, ends=True)
            return True
        # The threads continue when it has begun. It ends when the links of all its ranks have moved
        # its data, one transfer after the other.
        begun = self.now + max(actor.begun_s for actor in actors)
        end += max(0.0, max(self.link_free[rank] for rank, _ in partners) - begun)
        for rank, _ in partners:
            self.link_free[rank] = end
        free = self.now + max(actor.busy_s for actor in actors)
        self._push(free, partners, frees=True, ends=False)
        self._push(end, partners, frees=False, ends=True)
        return True

    def _push(
        self, when: float, actor_ids: tuple[ActorId, ...], *, frees: bool, ends: bool
    ) -> None:
        self.sequence += 1
        heapq.heappush(self.running, (when, self.sequence, actor_ids, frees, ends))

    def _look_at(self, actor_ids: Iterable[ActorId]) -> None:
        """Add the actors among these that have become ready."""
        for actor_id in actor_ids:
            if self.game.is_ready(actor_id):
                self.ready[self._thread(actor_id)][actor_id] = self._priority(actor_id)

    def _thread(self, actor_id: ActorId) -> ThreadId:
        return actor_id[0], self.game.actor(actor_id).thread

    def _stuck(self) -> list[str]:
        lines = []
        for actor_ids in self.pending.values():
            for actor_id in sorted(actor_ids, key=lambda actor_id: self.rank_of[actor_id][2]):
                wait = next(self.game.waits(actor_id), None)
                if wait is not None:
                    lines.append(f"rank {actor_id[0]}: {actor_id[1]} {wait.reason}")
        return lines[:12]


def _urgency(part: RankPlan, actor: Actor) -> int:
    """Return the priority: work that other ranks wait for, then work that overlaps the thread."""
    if isinstance(actor, Send):
        return 0
    # An actor that only prepares states for a collective that begins early, such as a bucket, goes
    # just before it.
    readers = [
        n for register in part.outputs_of[actor.name] if register.keys for n in register.consumers
    ]
    leads = not actor.inputs and bool(readers)
    leads = leads and all(_is_begun_early(part.by_name[name]) for name in readers)
    return 1 if _is_begun_early(actor) or leads else 2


def _is_begun_early(actor: Actor) -> bool:
    """Whether an actor starts work in parallel with its thread; it then goes first.

    An update that only reads states could begin with the step, and would hold memory all along.
    """
    return actor.overlaps and (bool(actor.inputs) or actor.phase is not Phase.OPTIMIZER)


_PHASES = {
    ActionKind.FORWARD: (Phase.FORWARD,),
    ActionKind.BACKWARD: (Phase.BACKWARD, Phase.WEIGHT_GRADIENT),
    ActionKind.INPUT_GRADIENT: (Phase.BACKWARD,),
    ActionKind.WEIGHT_GRADIENT: (Phase.WEIGHT_GRADIENT,),
}


def is_report(actor: Actor) -> bool:
    """Whether an actor receives a value for the user alone, which no other actor takes."""
    return isinstance(actor, Receive) and not actor.outputs and not actor.writes


class Turns:
    """The turns of a rank whose strategy gives the order of its forward and backward work.

    An action is the work of one stage and phase for one micro-batch: all segments, sums and boxing
    in between. Actions are done in the order that the strategy gives (`Strategy.orders`), one after
    the other:

        orders   0F0 0F1 0B0 0F2 ...
        turn     0   1   2   3         an actor of turn 3 starts when all of the turns 0 to 2 have

    Work that is done once a step belongs to no action. Before the first action comes work that the
    forward phase waits for, such as parameters that are gathered once; after the last action come
    the boxing of sums, and the optimizer. Messages are sent as soon as they are made, because other
    ranks wait for them. Without an order, every actor may always start.

    Attributes:
        now: The turn whose actors may start.

    Args:
        part: The plan of the rank.
        order: The order of its actions; empty if the quotas decide.
        num_micro_batches: Micro-batches of a step.
    """

    def __init__(self, part: RankPlan, order: Sequence[Action], num_micro_batches: int) -> None:
        self._turns = {
            (action.stage, phase, action.micro_batch): turn
            for turn, action in enumerate(order)
            for phase in _PHASES[action.kind]
        }
        self._num_turns = len(order)
        self._waiting = Counter(
            turn
            for actor in part.actors
            for index in range(num_micro_batches)
            if (turn := self._turn(actor, index)) is not None
        )
        self.now = 0
        self._pass_on()

    def place(self, actor: Actor, index: int) -> int:
        """Return the place of a firing among those that could start."""
        turn = self._turn(actor, index)
        if turn is not None:
            return turn
        return -1 if actor.phase is Phase.FORWARD else self._num_turns

    def is_on(self, actor: Actor, index: int) -> bool:
        """Whether the order of actions lets a firing start."""
        turn = self._turn(actor, index)
        return turn is None or turn <= self.now

    def start(self, actor: Actor, index: int) -> None:
        """Record that a firing has started."""
        turn = self._turn(actor, index)
        if turn is not None:
            self._waiting[turn] -= 1
            self._pass_on()

    def _turn(self, actor: Actor, index: int) -> int | None:
        if actor.rate is not Rate.MICRO or isinstance(actor, Send) or is_report(actor):
            return None
        return self._turns.get((actor.stage, actor.phase, index))

    def _pass_on(self) -> None:
        # An action may have no actors, such as the weight gradients of a stage without weights.
        while self.now < self._num_turns and not self._waiting[self.now]:
            self.now += 1


def early_receives(part: RankPlan, thread: str) -> Mapping[int, tuple[int, ...]]:
    """Return the receives that a thread posts before each firing, as places in its order.

    Transports move a message once its receive is posted. So a thread posts its next receive as soon
    as the last one has arrived, and computes while the message is on its way:

        the order of a thread      receive a0   F0   B0   receive a1   F1   B1
        posts                    a0          a1                     a2

    One posting is a run of receives with nothing between them, such as all tensors that cross from
    one stage to the next. At most one run is posted and has not arrived, so this holds little
    memory, which `sbp_core.memory` counts. A receive that needs a value of its own rank is posted
    when it fires. Orders ignore all this, because an early posting only shortens a wait.

    Args:
        part: The plan of the rank, with firing orders.
        thread: Name of its thread.
    """
    found: dict[int, list[int]] = defaultdict(list)
    asks, in_run = 0, False
    for place, (name, _) in enumerate(part.orders[thread]):
        actor = part.by_name[name]
        if isinstance(actor, Receive):
            if not actor.inputs and not actor.reads:
                found[asks].append(place)
            in_run = True
        elif in_run:
            asks, in_run = place, False
    return {place: tuple(receives) for place, receives in found.items()}
