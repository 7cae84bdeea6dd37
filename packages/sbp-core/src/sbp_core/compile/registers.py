"""Connect the actors (units of work) of a plan by registers on a rank, and by links between ranks.

A register hands results of one actor to its users, and limits how many are alive. `segments` calls
this when it forms the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sbp_core.boxing.slices import transfer_partners
from sbp_core.compile.actors import Actor, Collective, Compute, Receive, Send
from sbp_core.compile.levels import is_gathered_on_use
from sbp_core.compile.physical import Channel, RankPlan, Register, token
from sbp_core.compile.program import LoweredProgram
from sbp_core.graph.ir import InputKind, Phase, Rate


def registers(program: LoweredProgram, actors: Sequence[Actor]) -> Iterable[Register]:
    """Yield the registers of one rank: one for all results of an actor with the same consumers."""
    consumers = _consumers(actors)
    for actor in actors:
        shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for key in actor.outputs:
            if consumers[key]:
                shared[tuple(user.name for user in consumers[key])].append(key)
        # A filling is freed as a whole, when the last consumer has taken it. So only keys that go
        # to the same consumers share a register:
        #
        #     a, b -> x         #0 (a, b) to x
        #     c -> x, y         #1 (c) to x, y
        for index, (names, keys) in enumerate(shared.items()):
            yield Register(
                name=f"{actor.name}#{index}",
                producer=actor.name,
                consumers=names,
                keys=tuple(keys),
                rate=actor.fill_rate,
                quota=_quota(program, actor, consumers[keys[0]], actor.fill_rate),
            )
        yield from _carrying(program, actor, actors)


def _consumers(actors: Sequence[Actor]) -> dict[str, list[Actor]]:
    consumers: dict[str, list[Actor]] = defaultdict(list)
    for actor in actors:
        for key in actor.inputs:
            consumers[key].append(actor)
    return consumers


def _carrying(
    program: LoweredProgram, writer: Actor, actors: Sequence[Actor]
) -> Iterable[Register]:
    """Yield the registers that carry an actor's new states from micro-batch to micro-batch.

    before: n = add(mean, m) writes mean   in micro-batch 1, n = mean + m
    after:  register n -> the readers      in micro-batch 2, n = n of micro-batch 1 + m
    """
    shared: dict[tuple[tuple[str, ...], int], list[tuple[str, str]]] = defaultdict(list)
    for state, key in writer.writes:
        by_staleness: dict[int, list[Actor]] = defaultdict(list)
        is_parameter = program.graph.input_kinds[state].kind is InputKind.PARAMETER
        for reader in carried_readers(program, state, actors):
            # Forward and backward compute with the version that the pipeline had when the
            # micro-batch entered. The update itself continues from the newest version.
            is_stale = is_parameter and reader.phase is not Phase.OPTIMIZER
            stale = program.strategy.staleness if is_stale else ()
            by_staleness[stale[reader.stage] if stale else 0].append(reader)
        for staleness, readers in by_staleness.items():
            shared[tuple(reader.name for reader in readers), staleness].append((state, key))
    for index, ((names, staleness), pairs) in enumerate(shared.items()):
        users = [actor for actor in actors if actor.name in names]
        # One filling is there when the step begins.
        if writer.phase is Phase.OPTIMIZER:
            # An update comes after the backward phase of its micro-batch, so before it takes a
            # place its readers have given one back. But its own reads are given back only at its
            # end.
            quota = 1 + max(staleness, int(any(u.phase is Phase.OPTIMIZER for u in users)))
        else:
            # The slowest reader may be this many micro-batches after the forward phase: the
            # backward phase reads the state that its own micro-batch's forward phase read.
            late = [user.stage for user in users if user.phase is not Phase.FORWARD]
            lag = max((program.strategy.in_flight[stage] for stage in late), default=1)
            quota = 1 + max(_quota(program, writer, users, Rate.MICRO), lag)
        yield Register(
            name=f"{writer.name}^{index}",
            producer=writer.name,
            consumers=names,
            keys=tuple(key for _, key in pairs),
            rate=writer.fill_rate,
            quota=quota,
            carries=tuple(state for state, _ in pairs),
            staleness=staleness,
        )


def carried_readers(program: LoweredProgram, state: str, actors: Sequence[Actor]) -> list[Actor]:
    """Return the actors that read a state that is carried, for each micro-batch or update."""
    if state not in program.graph.carried:
        return []
    return [actor for actor in actors if state in actor.reads and actor.rate is not Rate.STEP]


def _quota(program: LoweredProgram, producer: Actor, users: Sequence[Actor], rate: Rate) -> int:
    """Return how many fillings may be alive.

    Values of the forward phase that the backward phase needs live for the micro-batches in flight,
    which is the difference between GPipe and 1F1B; a register between threads is double-buffered.
    """
    if rate is not Rate.MICRO:
        return 1
    # Stage 0 of two, four micro-batches, forward 1 to 4 and backward a to d:
    #
    #     in flight 2 (1F1B)     1 2 . a 3 b 4 c . d        activations of two at a time
    #     in flight 4 (GPipe)    1 2 3 4 . . a b c d        activations of all four
    phases = {user.phase for user in users} - {producer.phase}
    if producer.phase is Phase.BACKWARD and not program.strategy.splits_backward:
        # Weight gradients that no schedule postpones come before the next input gradients.
        phases.discard(Phase.WEIGHT_GRADIENT)
    crosses = phases and producer.phase is not Phase.WEIGHT_GRADIENT
    # Values that pass between chunks of one rank wait for the other chunk's turn.
    stages = {producer.stage, *(user.stage for user in users)}
    if crosses or len(stages) > 1:
        return max(program.strategy.in_flight[stage] for stage in stages)
    # On one thread a second filling would gain nothing, because no two actors fire at once; but
    # boxing in flight continues while its thread fires other actors.
    beside = producer.overlaps or any(
        user.thread != producer.thread or user.overlaps for user in users
    )
    return min(2, program.strategy.num_micro_batches) if beside else 1


def prefetch_registers(
    program: LoweredProgram, actors: Sequence[Actor], prefetch: int, *, overlaps: bool
) -> Iterable[Register]:
    """Yield registers without values that keep parameters from being gathered too early.

    Boxing in parallel with compute would gather all of them at once. So would a stage without such
    boxing while it waits: for another stage, or for a backward phase that gives back credits. So
    each gather, or the packing for it, takes a token of the segment that is `prefetch + 1` segments
    before the first user of its result.

    before: gather w1, gather w2, gather w3 | forward.1 forward.2 forward.3
    after:  gather w1, gather w2 | forward.1 -> gather w3 | forward.2 forward.3       prefetch 1

    Args:
        program: The lowered program.
        actors: The actors of a rank.
        prefetch: How many segments ahead of its first user a parameter may be gathered.
        overlaps: Whether boxing is in parallel with compute.
    """
    strategy, count = program.strategy, program.strategy.num_micro_batches
    if not overlaps and len(strategy.stages) == 1:
        if strategy.in_flight[0] >= count:
            return  # One thread that never waits gathers in the order of use.
        prefetch = 0  # The thread is never idle: to gather earlier saves no time.
    users = _consumers(actors)
    lines: dict[int, list[str]] = defaultdict(list)
    apart = {item.name for item in program.lowered.items if item.is_apart}
    for actor in actors:
        # An actor without inputs from other actors may fire when the step begins.
        waits = bool(actor.inputs) or actor.phase is Phase.FORWARD
        computes = isinstance(actor, Compute) and actor.name not in apart
        if computes and waits and actor.rate is Rate.MICRO:
            lines[actor.stage].append(actor.name)
    for actor in actors:
        leads = isinstance(actor, Collective) or actor.name in apart
        gathers = leads and actor.rate is Rate.MICRO
        taken = (*actor.reads, *actor.inputs)
        if not gathers or not any(is_gathered_on_use(program.graph, key) for key in taken):
            continue
        line = lines[actor.stage]
        place = {name: number for number, name in enumerate(line)}
        first = min((place[n] for n in _segments_behind(actor, users) if n in place), default=0)
        if first > prefetch:
            # Its token signals that the segment has fired. There are as many tokens as
            # micro-batches, so the register never holds the segment back.
            before = line[first - 1 - prefetch]
            yield token(before, actor.name, rate=Rate.MICRO, quota=count)


def _segments_behind(actor: Actor, users: Mapping[str, Sequence[Actor]]) -> Iterable[str]:
    """Yield the compute actors that take an actor's results, also through boxing actors."""
    for key in actor.outputs:
        for user in users.get(key, ()):
            if isinstance(user, Compute):
                yield user.name
            else:
                yield from _segments_behind(user, users)


def links(program: LoweredProgram, ranks: Sequence[RankPlan]) -> Iterable[Channel]:
    """Yield the links of all transfers, from each sender to the receivers of its messages."""
    in_flight, orders = program.strategy.in_flight, program.strategy.orders
    receives = {
        (part.rank, actor.step): actor.name
        for part in ranks
        for actor in part.actors
        if isinstance(actor, Receive)
    }
    receivers: dict[int, Mapping[int, tuple[int, ...]]] = {}
    for part in ranks:
        for actor in part.actors:
            if not isinstance(actor, Send):
                continue
            if actor.step not in receivers:
                receivers[actor.step], _ = transfer_partners(program.steps[actor.step])
            for rank in receivers[actor.step].get(part.rank, ()):
                yield Channel(
                    name=f"{actor.name} {part.rank}>{rank}",
                    sender=(part.rank, actor.name),
                    receiver=(rank, receives[rank, actor.step]),
                    # A fixed order of actions may send long before its receiver's turn: never more
                    # than there are micro-batches between forward and backward on either side.
                    quota=max(in_flight) if orders else in_flight[actor.stage],
                )
