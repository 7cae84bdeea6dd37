"""The checker of plans: prove, before any device is used, that a plan is live and bounded.

An actor (a segment of operators, or a boxing step) fires when its inputs have values and its output
registers have room. Within a step the plan is a dataflow program on counted tokens: in whatever
order ready actors fire, the same firings happen (Kahn). So replaying the fixed thread orders once
is a proof. Either all firings happen, and the step ends with the tokens with which it began, so
every later step is the same; or the replay stops, and the threads that wait for each other form the
cycle of the deadlock. `sbp_core.memory` checks the memory of the devices.

In the replay, a send waits until its receivers have finished with the message that was sent `quota`
messages before. Between ranks of one process, acknowledgements implement this. Between processes a
posted receive is the credit (`Communicator.send`):

    sender      before message i it waits until message i - quota is received, or being received:
                it holds at most `quota` messages
    receiver    a receive is posted when it fires, or ahead of that, at most one run of receives of
                a thread (`compile.early_receives`): it holds these besides its registers

A receive is posted at the latest when it fires, so a rank that waits for it waits no longer than in
the replay. Shorter waits never stop a marked graph, so the proof holds for processes, too.

The replayed values are types: the installed tensor library calls each operator on tensors without
data, so that accepted calls also run. A run may still refuse values, such as an index out of range.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sbp_core.boxing.slices import transfer_partners
from sbp_core.boxing.step import StepKind
from sbp_core.compile.actors import (
    Accumulate,
    Actor,
    ActorId,
    BoxingActor,
    Collective,
    Compute,
    Receive,
    Send,
    keys_out,
)
from sbp_core.compile.hazards import verify_overwriting
from sbp_core.compile.offload import fetched_keys
from sbp_core.compile.physical import PhysicalPlan, RankPlan, Register
from sbp_core.compile.plan_network import PlanNetwork
from sbp_core.compile.plan_spec import verify_plan
from sbp_core.compile.symmetry import FoldedPlan, fold, shard_shapes
from sbp_core.dataflow import CriticalCycle, critical_cycle, latency
from sbp_core.errors import PlanError
from sbp_core.graph.ir import Rate
from sbp_core.interpreter import Firing, Interpreter
from sbp_core.interpreter.domain import V, Values
from sbp_core.memory import CountedFillings, TypedValues, installed_layouts

__all__ = ["CheckReport", "check"]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of the replay of one step, and the times by the plan's network.

    Args:
        num_firings: Firings of all ranks in a step.
        occupancy: Most fillings (values in a register) that were alive, by (rank, register).
        plan: The plan that was checked.
    """

    num_firings: int
    occupancy: Mapping[tuple[int, str], int]
    plan: PhysicalPlan = field(repr=False)

    @property
    def period_s(self) -> float:
        """Time from one step to the next if steps follow without a pause, in seconds.

        Each rank begins its next step when it has finished the last one, as processes do (see
        `compile.plan_network`).
        """
        return float(self._critical.period_s)

    @cached_property
    def latency_s(self) -> float:
        """Time of a step by itself, in seconds."""
        return float(latency(self._network.network))

    @cached_property
    def critical_cycle(self) -> tuple[str, ...]:
        """The cycle of waits that limits the rate of steps, one line each, the last for the first.

        Among ranks that do the same, it names the first.
        """
        return tuple(self._network.cycle_lines(self._critical.waits))

    @cached_property
    def _network(self) -> PlanNetwork:
        return PlanNetwork(fold(self.plan))

    @cached_property
    def _critical(self) -> CriticalCycle:
        return critical_cycle(self._network.network)


def check(plan: PhysicalPlan, *, types: bool = True) -> CheckReport:
    """Prove that a plan is live and bounded, and that its operators accept their arguments.

    Args:
        plan: A plan with firing orders.
        types: Whether every operator is called on tensors without data, if a tensor library is
            installed. A newly compiled plan of a captured graph does not need this slow check.

    Raises:
        PlanError: a part is invalid (see `compile.plan_spec`); actors, registers and links do not
            fit together; an actor is missing from the orders; the plan would deadlock (with the
            cycle), or a register would overflow; an operator is not allowed in plans, or does not
            accept its arguments; a state may be overwritten before all readers have finished with
            its old value (see `compile.hazards`).
    """
    verify_plan(plan)
    partners = _Partners(plan)
    # Parts that ranks share are checked once.
    seen: set[tuple[int, ...]] = set()
    boxing: dict[int, list[BoxingActor]] = {}
    for part in plan.ranks:
        shared = id(part.slots), id(part.actors), id(part.registers)
        if shared not in seen:
            slots = {slot.name for slot in part.slots}
            for one in part.actors:
                _check_actor(part, slots, one)
            for register in part.registers:
                _check_register(plan, part, register)
            seen.add(shared)
            boxing[id(part.actors)] = [a for a in part.actors if isinstance(a, BoxingActor)]
        for actor in boxing[id(part.actors)]:
            partners.check(part.rank, actor)
    # Every register is filled and read equally often by now. So if all firings of the orders
    # happen, the step ends with the data and credits that it began with: one step stands for all.
    _check_orders(plan)
    layouts = installed_layouts() if types else None
    # One rank represents all equal ranks of its class (`compile.symmetry`).
    marks = None if layouts is None else shard_shapes(plan.steps)
    folded = fold(plan, marks, numbers=layouts is not None)
    few, stands_for = folded.plan, folded.stands_for
    if layouts is None:
        tokens = _Tokens()
        states = {part.rank: dict.fromkeys(slot.name for slot in part.slots) for part in few.ranks}
        return _replayed(plan, folded, tokens, Interpreter(few, tokens, states, {}, stands_for))
    typed = TypedValues(few, layouts)
    replay = Interpreter(few, typed, typed.states, typed.fed, stands_for)
    return _replayed(plan, folded, typed, replay)


def _replayed(
    plan: PhysicalPlan, folded: FoldedPlan, domain: CountedFillings[V], replay: Interpreter[V]
) -> CheckReport:
    """Replay a step of a folded plan, and return the report for the whole plan.

    Raises:
        PlanError: it deadlocks, or a state is overwritten too early.
    """
    if not replay.run():
        raise PlanError(
            "the plan would deadlock: each of these waits for the next",
            where=_cycle(replay),
            todo=PlanNetwork(folded).quotas_to_raise(),
        )
    verify_overwriting(plan, folded, domain.firings)
    return CheckReport(
        num_firings=sum(len(folded.members[rank]) for rank, _ in domain.firings),
        occupancy={
            (member, register): live
            for (rank, register), live in domain.occupancy.items()
            for member in folded.members[rank]
        },
        plan=plan,
    )


def _check_actor(part: RankPlan, slots: set[str], actor: Actor) -> None:
    """Check that an actor's inputs exist, once each, and that it takes the states it overwrites."""
    where = f"actor {actor.name!r} of rank {part.rank}"
    # It may overwrite only inputs that are copies for it alone.
    given = {
        key
        for register in part.inputs_of[actor.name]
        if register.consumers == (actor.name,) and register.producer in part.by_name
        for key in fetched_keys(part.by_name[register.producer])
        if key in register.keys
    }
    donated = actor.donated if isinstance(actor, Compute) else ()
    if wrong := set(donated) - given:
        raise PlanError(
            f"is given {min(wrong)!r} to write over, which other actors may hold",
            where=where,
            accepted="copies of offloaded states that no other actor takes",
        )
    filled = [
        key
        for register in part.inputs_of[actor.name]
        if not register.carries
        for key in register.keys
    ]
    for key in (*actor.inputs, *actor.reads):
        found = filled.count(key) if key in actor.inputs else int(key in slots)
        if found != 1:
            raise PlanError(
                f"{key!r} comes from {found} places",
                where=where,
                accepted="one register for each input, a slot for each state, batch part or scalar",
            )


class _Partners:
    """The partners of boxing actors: the actors of other ranks that do the same boxing step."""

    def __init__(self, plan: PhysicalPlan) -> None:
        self.plan = plan
        self._receivers: dict[ActorId, list[ActorId]] = defaultdict(list)
        self._senders: dict[ActorId, list[ActorId]] = defaultdict(list)
        for link in plan.links:
            self._receivers[link.sender].append(link.receiver)
            self._senders[link.receiver].append(link.sender)
        #: For each transfer, by sender its receivers, and by receiver its senders.
        self._transfers = {
            index: transfer_partners(step)
            for index, step in enumerate(plan.steps)
            if step.kind is StepKind.TRANSFER
        }
        #: Collectives whose whole group is complete, by the check of one of its ranks.
        self._there: set[ActorId] = set()

    def check(self, rank: int, actor: BoxingActor) -> None:
        """Check that the partners of a boxing actor exist."""
        plan, where = self.plan, f"actor {actor.name!r} of rank {rank}"
        if actor.step not in range(len(plan.steps)):
            raise PlanError(
                f"there is no boxing step {actor.step}",
                where=where,
                accepted=f"0 .. {len(plan.steps) - 1}",
            )
        if gone := self._missing(rank, actor):
            raise PlanError(
                f"nothing of this boxing step is planned on the ranks {gone}",
                where=(where, str(plan.steps[actor.step])),
                accepted="an actor on every rank of the step, and a link from each sender to each "
                "receiver that it has something for",
            )

    def _missing(self, rank: int, actor: BoxingActor) -> list[int]:
        """Return the ranks that lack the partner of a boxing actor.

        Only actors of the same step and rate count: others would move another tensor, or less
        often.
        """
        step = self.plan.steps[actor.step]
        # A collective must not name a transfer, and the ends of a transfer must name one; a local
        # step is not an actor, but an instruction.
        if step.kind is StepKind.LOCAL or isinstance(actor, Collective) == (
            step.kind is StepKind.TRANSFER
        ):
            return [rank]
        if isinstance(actor, Collective):
            if (rank, actor.name) in self._there:
                return []
            group = step.group(rank)
            gone = [r for r in group if not self._does((r, actor.name), actor, Collective)]
            if not gone:
                self._there.update((r, actor.name) for r in group)
            return gone
        if rank not in (step.source if isinstance(actor, Send) else step.target)[0]:
            return [rank]
        receivers, senders = self._transfers[actor.step]
        kind: type[BoxingActor]
        if isinstance(actor, Send):
            ends, wanted, kind = self._receivers, receivers, Receive
        else:
            ends, wanted, kind = self._senders, senders, Send
        there = {end[0] for end in ends.get((rank, actor.name), ()) if self._does(end, actor, kind)}
        return [r for r in wanted.get(rank, ()) if r not in there]

    def _does(self, actor_id: ActorId, like: BoxingActor, kind: type[BoxingActor]) -> bool:
        there = self.plan.by_rank.get(actor_id[0])
        found = None if there is None else there.by_name.get(actor_id[1])
        return isinstance(found, kind) and (found.step, found.rate) == (like.step, like.rate)


def _check_register(plan: PhysicalPlan, part: RankPlan, register: Register) -> None:
    """Check that a register is filled and read equally often, by existing actors."""
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
    # A register without values may signal that the last micro-batch of a step has finished.
    is_token = not register.keys and register.rate is Rate.STEP
    # With one micro-batch all rates are the same number of fillings.
    if register.rate is not producer.fill_rate and plan.num_micro_batches > 1 and not is_token:
        raise PlanError(
            f"{producer.name!r} fills at rate {producer.fill_rate.value!r}, the register at rate "
            f"{register.rate.value!r}",
            where=where,
            accepted="the rate of the producer, or of the sums of an accumulation",
        )
    _check_carried(part, register)
    fillings = plan.repetitions[register.rate]
    for name in register.consumers:
        reads = part.by_name[name].num_firings(plan.repetitions)
        # Readers at the rate of an update read its initial states for each of its micro-batches.
        if reads % fillings if register.carries else reads != fillings:
            raise PlanError(
                f"filled {fillings} times a step, read {reads} by {name!r}", where=where
            )
        # Readers of a carried state know it by the state's name, not by the key of its new value.
        taken = register.carries or register.keys
        unread = set(taken).difference(part.by_name[name].inputs, part.by_name[name].reads)
        if unread:
            raise PlanError(f"{name!r} does not take {sorted(unread)}", where=where)


def _check_carried(part: RankPlan, register: Register) -> None:
    """Check that a register carries only states that its producer writes."""
    if register.staleness < 0 or (register.staleness and not register.carries):
        raise PlanError(
            f"is stale by {register.staleness} updates, and carries {list(register.carries)}",
            where=f"register {register.name!r} of rank {part.rank}",
            accepted="a staleness >= 0, and 0 of a register that carries no states",
        )
    if not register.carries:
        return
    written = set(part.by_name[register.producer].writes)
    pairs = list(zip(register.carries, register.keys, strict=False))
    whole = len(register.carries) == len(register.keys) and register.rate is not Rate.STEP
    if not whole or not written.issuperset(pairs):
        raise PlanError(
            f"carries {list(register.carries)} as {list(register.keys)}; {register.producer!r} "
            f"writes {sorted(written)}",
            where=f"register {register.name!r} of rank {part.rank}",
            accepted="states that its producer writes several times a step, one for each key",
        )


def _check_orders(plan: PhysicalPlan) -> None:
    seen: set[tuple[int, int]] = set()
    for part in plan.ranks:
        # Ranks of one class share them.
        if (id(part.actors), id(part.orders)) in seen:
            continue
        seen.add((id(part.actors), id(part.orders)))
        listed: dict[str, int] = defaultdict(int)
        for thread, order in part.orders.items():
            for name, index in order:
                actor = part.by_name.get(name)
                if actor is None or actor.thread != thread or index != listed[name]:
                    raise PlanError(
                        f"firing {index} of {name!r} is not due there",
                        where=f"the orders of thread {thread!r} of rank {part.rank}",
                        accepted="each firing of its own actors once, in turn",
                    )
                listed[name] += 1
        for actor in part.actors:
            if listed[actor.name] != actor.num_firings(plan.repetitions):
                raise PlanError(
                    f"{actor.name!r} fires {listed[actor.name]} times a step",
                    where=f"the orders of rank {part.rank}",
                    accepted=f"{actor.num_firings(plan.repetitions)} times",
                )


class _Tokens(CountedFillings[None]):
    """The domain of a replay that only counts: values have no content."""

    def compute(self, firing: Firing[Compute], taken: Values[None]) -> Values[None]:
        """See `Domain.compute`."""
        return dict.fromkeys(keys_out(firing.actor))

    def collective(
        self, firings: Sequence[Firing[Collective]], shards: Mapping[int, None]
    ) -> Mapping[int, None]:
        """See `Domain.collective`."""
        return shards

    def receive(self, firing: Firing[Receive], shards: Mapping[int, None]) -> None:
        """See `Domain.receive`."""

    def add(
        self,
        firing: Firing[Accumulate],
        term: tuple[str, str, float | str | None],
        total: None,
        part: None,
    ) -> None:
        """See `Domain.add`."""


def _cycle(replay: Interpreter[V]) -> list[str]:
    """Follow waiting threads until one repeats.

    thread a  waits for data of -->  thread b  waits for credit of -->  thread c
                                         ^------  waits for rank -----------|
    the cycle: b, c
    """
    firings = replay.firings
    thread = next(firings.waiting())
    lines: dict[tuple[int, str], str] = {}
    while thread not in lines:
        # Each waiting thread waits for one actor, and so for one thread. There are finitely many
        # threads, so the walk returns to one of them: the cycle begins there.
        actor_id = firings.head(thread)
        assert actor_id is not None, "a finished thread keeps nobody waiting"
        reason, on = firings.blocker(actor_id)
        actor, started = firings.game.actor(actor_id), firings.game.started[actor_id]
        is_one_of_many = actor.num_firings(replay.plan.repetitions) > 1
        number = f" of micro-batch {started}" if is_one_of_many else ""
        place = f"rank {actor_id[0]}, thread {thread[1]}"
        lines[thread] = f"{place}: stage {actor.stage}'s {actor.name}{number} {reason}"
        thread = firings.thread(on)
    start = list(lines).index(thread)
    return list(lines.values())[start:]
