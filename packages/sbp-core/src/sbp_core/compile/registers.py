"""Registers and links: who hands what to whom, and how much of it may be alive. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sbp_core.compile.physical import Actor, ActorKind, Link, RankPlan, Register
from sbp_core.compile.program import Program
from sbp_core.graph.ir import Phase, Rate


def registers(program: Program, rank: int, actors: Sequence[Actor]) -> Iterable[Register]:
    """Yield the registers of one rank: one for all that an actor makes for the same consumers."""
    consumers: dict[str, list[Actor]] = defaultdict(list)
    for actor in actors:
        for key in actor.inputs:
            consumers[key].append(actor)
    for actor in actors:
        shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for key in actor.outputs:
            if consumers[key]:
                shared[tuple(user.name for user in consumers[key])].append(key)
        rate = Rate.STEP if actor.kind is ActorKind.ACCUMULATE else actor.rate
        for index, (names, keys) in enumerate(shared.items()):
            yield Register(
                name=f"{actor.name}#{index}",
                producer=actor.name,
                consumers=names,
                keys=tuple(keys),
                rate=rate,
                quota=_quota(program, actor, consumers[keys[0]], rate),
                size_bytes=sum(program.bytes_of(rank, key) for key in keys),
            )


def _quota(program: Program, producer: Actor, users: Sequence[Actor], rate: Rate) -> int:
    """Return how many fillings may be alive.

    What the backward phase needs of the forward phase lives for the micro-batches in flight,
    which is what tells GPipe from 1F1B; a register between threads is double-buffered.
    """
    if rate is Rate.STEP:
        return 1
    crosses = producer.phase is Phase.FORWARD and any(
        user.phase is not Phase.FORWARD for user in users
    )
    if crosses:
        return program.strategy.in_flight[producer.stage]
    between_threads = any(user.thread != producer.thread for user in users)
    return min(2, program.strategy.num_micro_batches) if between_threads else 1


def links(program: Program, ranks: Sequence[RankPlan]) -> Iterable[Link]:
    """Yield the links between senders and receivers of all transfers."""
    for part in ranks:
        for actor in part.actors:
            if actor.kind is not ActorKind.SEND:
                continue
            receive = actor.name.replace("send ", "receive ", 1)
            for rank in program.steps[actor.step].target[0].rank_list:
                yield Link(
                    name=f"{actor.name} {part.rank}>{rank}",
                    sender=(part.rank, actor.name),
                    receiver=(rank, receive),
                    quota=program.strategy.in_flight[actor.stage],
                )
