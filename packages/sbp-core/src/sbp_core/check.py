"""Check a plan before any device is touched: it is live, its registers are bounded, it fits memory.

Within a step the plan is a deterministic dataflow program on counted tokens: whichever order ready
actors fire in, the same firings happen (Kahn). So replaying the fixed thread orders once is a
proof: either all firings happen, and the step ends in the marking it began with, so every later
step goes the same way; or the replay stops, and the threads that wait for each other are the guilty
cycle.

Stability: provisional.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sbp_core.boxing.slices import sent_bytes
from sbp_core.boxing.step import StepKind
from sbp_core.compile.firings import Firings, ThreadId
from sbp_core.compile.physical import Actor, ActorKind, PhysicalPlan, RankPlan, Register
from sbp_core.compile.plan_spec import verify_plan
from sbp_core.compile.token_game import ActorId, TokenGame
from sbp_core.errors import PlanError
from sbp_core.exports import make_callable
from sbp_core.graph.ir import InputKind, Rate
from sbp_core.units import format_bytes

__all__ = ["CheckReport", "check", "check_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Estimated bytes of one rank, without torch; `sbp_core.memory.predict` knows them exactly.

    Args:
        states: Parameters, buffers and optimizer states that it stores.
        peak: Most bytes alive at once: states, their new values, registers, what was sent and not
            yet received, and what one firing needs inside. Batches and scalars are not in it.
    """

    states: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What the replay of one step showed.

    Args:
        num_firings: Firings of all ranks in a step.
        occupancy: Most fillings that were alive, by (rank, register).
        memory: By rank.
    """

    num_firings: int
    occupancy: Mapping[tuple[int, str], int]
    memory: Mapping[int, RankMemory]

    @property
    def needs(self) -> dict[int, tuple[int, int]]:
        """By rank the estimated peak and the bytes of states."""
        return {name: (rank.peak, rank.states) for name, rank in self.memory.items()}


def check(plan: PhysicalPlan, *, memory_bytes: int | None = None) -> CheckReport:
    """Prove a plan live and bounded and compute its memory.

    Args:
        plan: With firing orders.
        memory_bytes: Memory of each rank, compared with the estimates of the report; None leaves
            memory unchecked. Who knows the exact peaks calls `check_memory` instead.

    Raises:
        PlanError: a part is none that there can be (see `compile.plan_spec`), actors, registers and
            links do not fit together, an actor is missing from the
            orders, the plan would deadlock (with the cycle), a register would overflow, or a rank
            would not fit.
    """
    verify_plan(plan)
    for part in plan.ranks:
        for actor in part.actors:
            _check_actor(plan, part, actor)
        for register in part.registers:
            _check_register(plan, part, register)
    _check_orders(plan)
    replay = _Replay(plan)
    replay.run()
    report = CheckReport(
        num_firings=replay.num_firings,
        occupancy=dict(replay.occupancy),
        memory={
            rank: RankMemory(states=replay.states[rank], peak=replay.peak[rank])
            for rank in replay.states
        },
    )
    if memory_bytes is not None:
        check_memory(report.needs, memory_bytes)
    return report


def check_memory(needs: Mapping[int, tuple[int, int]], memory_bytes: int) -> None:
    """Check that every rank fits its memory.

    Args:
        needs: By rank the most bytes alive at once, and those of states: exact ones
            (`MemoryReport.needs`) where they are known, else the estimates (`CheckReport.needs`).
        memory_bytes: Memory of each rank.

    Raises:
        PlanError: a rank needs more.
    """
    rank, (peak, states) = max(needs.items(), key=lambda entry: entry[1])
    if peak > memory_bytes:
        raise PlanError(
            f"rank {rank} would need {format_bytes(peak)}, {format_bytes(states)} of it for "
            f"states, and has {format_bytes(memory_bytes)}",
            accepted="plans that fit cluster.memory_bytes",
            todo="shard states (planner=osdp), use smaller micro-batches, or more ranks",
        )


def _check_actor(plan: PhysicalPlan, part: RankPlan, actor: Actor) -> None:
    """Check that what an actor takes is there, once, and that its partners are."""
    where = f"actor {actor.name!r} of rank {part.rank}"
    filled = [
        key
        for register in part.inputs_of[actor.name]
        if not register.carries
        for key in register.keys
    ]
    slots = {slot.name for slot in part.slots}
    for key in (*actor.inputs, *actor.reads):
        found = filled.count(key) if key in actor.inputs else int(key in slots)
        if found != 1:
            raise PlanError(
                f"{key!r} comes from {found} places",
                where=where,
                accepted="one register for each input, a slot for each state, batch part or scalar",
            )
    if actor.kind in (ActorKind.COMPUTE, ActorKind.ACCUMULATE):
        return
    if actor.step not in range(len(plan.steps)):
        raise PlanError(
            f"there is no boxing step {actor.step}",
            where=where,
            accepted=f"0 .. {len(plan.steps) - 1}",
        )
    gone = _missing_partners(plan, part.rank, actor)
    if gone:
        raise PlanError(
            f"nothing of this boxing step is planned on the ranks {gone}",
            where=(where, str(plan.steps[actor.step])),
            accepted="an actor on every rank of the step, and links between senders and receivers",
        )


def _missing_partners(plan: PhysicalPlan, rank: int, actor: Actor) -> list[int]:
    """Return the ranks on which no actor does the other part of a boxing actor's step.

    Only actors of the same step and rate count: others would move something else, or not as often.
    """

    def does(place: ActorId, kind: ActorKind) -> bool:
        there = plan.by_rank.get(place[0])
        found = None if there is None else there.by_name.get(place[1])
        return found is not None and (found.kind, found.step, found.rate) == (
            kind,
            actor.step,
            actor.rate,
        )

    step = plan.steps[actor.step]
    if (actor.kind is ActorKind.COLLECTIVE) == (step.kind is StepKind.TRANSFER):
        return [rank]
    if actor.kind is ActorKind.COLLECTIVE:
        return [r for r in step.group(rank) if not does((r, actor.name), ActorKind.COLLECTIVE)]
    if actor.kind is ActorKind.SEND:
        ends = [link.receiver for link in plan.links if link.sender == (rank, actor.name)]
        wanted, kind = step.target[0].rank_list, ActorKind.RECEIVE
    else:
        ends = [link.sender for link in plan.links if link.receiver == (rank, actor.name)]
        wanted, kind = step.source[0].rank_list, ActorKind.SEND
    there = {place[0] for place in ends if does(place, kind)}
    return [r for r in wanted if r not in there]


def _check_register(plan: PhysicalPlan, part: RankPlan, register: Register) -> None:
    """Check that a register is filled and read equally often, by actors that there are."""
    where = f"register {register.name!r} of rank {part.rank}"
    unknown = sorted({register.producer, *register.consumers} - set(part.by_name))
    if unknown or not register.consumers or register.quota < 1:
        raise PlanError(
            f"a register of quota {register.quota} from {register.producer!r} to "
            f"{list(register.consumers)}" + (f"; there is no {unknown}" if unknown else ""),
            where=where,
            accepted="a producer, at least one consumer, a quota >= 1",
        )
    lacking = set(register.keys) - set(part.by_name[register.producer].outputs)
    if lacking:
        raise PlanError(f"{register.producer!r} does not make {sorted(lacking)}", where=where)
    producer = part.by_name[register.producer]
    fills = Rate.STEP if producer.kind is ActorKind.ACCUMULATE else producer.rate
    if register.rate is not fills and plan.num_micro_batches > 1:
        raise PlanError(
            f"{register.producer!r} fills at rate {fills.value!r}, the register at rate "
            f"{register.rate.value!r}",
            where=where,
            accepted="the producer's rate; 'step' for the sums of an accumulation",
        )
    _check_carried(part, register)
    fillings = 1 if register.rate is Rate.STEP else plan.num_micro_batches
    for name in register.consumers:
        reads = part.by_name[name].num_firings(plan.num_micro_batches)
        if reads != fillings:
            raise PlanError(
                f"filled {fillings} times a step, read {reads} by {name!r}", where=where
            )


def _check_carried(part: RankPlan, register: Register) -> None:
    """Check that what a register carries are states, which its producer writes."""
    if not register.carries:
        return
    written = set(part.by_name[register.producer].writes)
    pairs = list(zip(register.carries, register.keys, strict=False))
    whole = len(register.carries) == len(register.keys) and register.rate is Rate.MICRO
    if not whole or not written.issuperset(pairs):
        raise PlanError(
            f"carries {list(register.carries)} as {list(register.keys)}; {register.producer!r} "
            f"writes {sorted(written)}",
            where=f"register {register.name!r} of rank {part.rank}",
            accepted="states that its producer writes for each micro-batch, one for each key",
        )


def _check_orders(plan: PhysicalPlan) -> None:
    for part in plan.ranks:
        listed: dict[str, int] = defaultdict(int)
        for thread, order in part.orders.items():
            for name, index in order:
                actor = part.by_name.get(name)
                if actor is None or actor.thread != thread or index != listed[name]:
                    raise PlanError(
                        f"thread {thread!r} of rank {part.rank} lists firing {index} of {name!r}",
                        accepted="each firing of its own actors once, in turn",
                    )
                listed[name] += 1
        for actor in part.actors:
            if listed[actor.name] != actor.num_firings(plan.num_micro_batches):
                raise PlanError(
                    f"rank {part.rank} fires {actor.name!r} {listed[actor.name]} times a step",
                    accepted=f"{actor.num_firings(plan.num_micro_batches)} times",
                )


class _Replay:
    """One step, fired in the orders of the plan."""

    def __init__(self, plan: PhysicalPlan) -> None:
        self.plan, self.game = plan, TokenGame(plan)
        self.firings = Firings(plan, self.game)
        self.num_firings = 0
        self.occupancy: dict[tuple[int, str], int] = defaultdict(int)
        self.states = {part.rank: _state_bytes(part) for part in plan.ranks}
        self.peak = dict(self.states)
        self.held: dict[int, int] = dict(self.states)
        #: What is in `held` beside states, by rank and by what it is for.
        self.counted: dict[tuple[int, str], int] = defaultdict(int)

    def run(self) -> None:
        if not self.firings.run(self._fire):
            raise PlanError(
                "the plan would deadlock: each of these waits for the next",
                where=self._cycle(),
                todo="raise in_flight of the stages named, or plan again",
            )

    def _fire(self, place: ActorId) -> None:
        for partner in self.game.partners(place):
            actor = self.game.actor(partner)
            rank = partner[0]
            self.peak[rank] = max(self.peak[rank], self.held[rank] + actor.transient_bytes)
            self.game.start(partner)
            self.game.finish(partner)
            self.firings.advance(partner)
            self.num_firings += 1
            self._count(rank, actor.name)

    def _count(self, rank: int, name: str) -> None:
        """Bring up to date what is alive after a firing; nothing that it did not touch changes."""
        part, place = self.plan.by_rank[rank], (rank, name)
        for register in part.outputs_of[name]:
            live = self.game.live(rank, register)
            if live > register.quota:
                raise PlanError(f"register {register.name} of rank {rank} holds {live} fillings")
            self.occupancy[(rank, register.name)] = max(live, self.occupancy[(rank, register.name)])
        for register in (*part.inputs_of[name], *part.outputs_of[name]):
            size = self.game.beside_states(rank, register) * register.size_bytes
            self._set(rank, f"register {register.name}", size)
        actor = part.by_name[name]
        self._set(rank, f"written by {name}", actor.written_bytes)
        if actor.kind is ActorKind.ACCUMULATE:
            sums = actor.transient_bytes if self._is_summing(place) else 0
            self._set(rank, f"sums of {name}", sums)
        senders = [place] if actor.kind is ActorKind.SEND else []
        for sender in (*senders, *(link.sender for link in self.game.receives[place])):
            step = self.plan.steps[self.game.actor(sender).step]
            size = self._in_transit(sender) * sent_bytes(step, sender[0])
            self._set(sender[0], f"sent by {sender[1]}", size)
        self.peak[rank] = max(self.peak[rank], self.held[rank])

    def _set(self, rank: int, what: str, size: int) -> None:
        """Set the bytes of one thing that may be alive on a rank."""
        self.held[rank] += size - self.counted[(rank, what)]
        self.counted[(rank, what)] = size

    def _in_transit(self, place: ActorId) -> int:
        """Return how many firings of a send some receiver has not yet taken."""
        taken = (self.game.finished[link.receiver] for link in self.game.sends[place])
        return max(0, self.game.finished[place] - min(taken))

    def _is_summing(self, place: ActorId) -> bool:
        return 0 < self.game.finished[place] < self.plan.num_micro_batches

    def _cycle(self) -> list[str]:
        """Follow waiting threads until one repeats."""
        thread = next(self.firings.waiting())
        lines: dict[ThreadId, str] = {}
        while thread not in lines:
            place = self.firings.head(thread)
            assert place is not None, "a finished thread keeps nobody waiting"
            reason, on = self._wait(place)
            lines[thread] = f"rank {place[0]}, thread {thread[1]}: {place[1]} {reason}"
            thread = self.firings.thread(on)
        start = list(lines).index(thread)
        return list(lines.values())[start:]

    def _wait(self, place: ActorId) -> tuple[str, ActorId]:
        for partner in self.game.partners(place):
            wait = next(self.game.waits(partner), None)
            if wait is not None and partner == place:
                return wait.reason, wait.on
            if self.firings.head(self.firings.thread(partner)) != partner:
                return f"waits for rank {partner[0]} to arrive", partner
        partner = next(p for p in self.game.partners(place) if not self.game.is_ready(p))
        return f"waits for rank {partner[0]}", partner


def _state_bytes(part: RankPlan) -> int:
    return sum(slot.local_bytes for slot in part.slots if InputKind(slot.kind).is_state)


make_callable(__name__)
