"""`Post`: an actor (one task of a rank in a plan) with its function, and the buffers around it.

`make_posts` makes the posts of a worker thread when the session starts. A `Post` decides whether
the actor may fire (run once): all inputs have arrived, and each output register (buffer) has a
credit (a free place). `worker` fires it. A link is a channel between ranks.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sbp_actor_runtime.message import ThreadId
from sbp_actor_runtime.register import InRegister, OutRegister
from sbp_actor_runtime.work import Work, work_of
from sbp_core.boxing import Communicator
from sbp_core.compile import Actor, ActorId, BoxingActor, Channel, PhysicalPlan, RankPlan
from sbp_torch.segments import SegmentMaker


class ActorFiring(NamedTuple):
    """One firing (execution) of an actor in a step: its number, and the registers that it fills.

    The number is the micro-batch's if the actor fires once for each micro-batch.
    """

    number: int
    fills: tuple[OutRegister, ...]


@dataclass(frozen=True, slots=True)
class Post:
    """One actor with its function, and the registers around it, ready to fire.

    Args:
        actor: The actor of the plan.
        work: The function that a firing calls.
        inputs: Registers that it reads.
        outputs: Registers that it fills.
        sends: Links that a send fills and whose receiver is in this process.
        receives: Name of each link that a receive empties, and the thread that gets its credit.
        is_boxing: Whether it takes part in boxing.
    """

    actor: Actor
    work: Work
    inputs: tuple[InRegister, ...]
    outputs: tuple[OutRegister, ...]
    sends: tuple[OutRegister, ...]
    receives: tuple[tuple[str, ThreadId], ...]
    is_boxing: bool

    def firing(self, index: int) -> ActorFiring:
        """Return the firing of a number."""
        return ActorFiring(index, tuple(end for end in self.outputs if end.is_filled_by(index)))

    def may_fire(self, firing: ActorFiring) -> bool:
        """Whether all inputs and credits for a firing have arrived."""
        return next(self._missing(firing), None) is None

    def describe_missing(self, firing: ActorFiring) -> str:
        """Return a text with the inputs and credits that the actor waits for."""
        return "; ".join(
            f"data in register {end.name} from rank {end.producer[0]}"
            if isinstance(end, InRegister)
            else f"credit of {end.name} from {end.slowest()}"
            for end in self._missing(firing)
        )

    def _missing(self, firing: ActorFiring) -> Iterator[InRegister | OutRegister]:
        for register in self.inputs:
            if not register.has_filling(firing.number):
                yield register
        for end in (*firing.fills, *self.sends):
            if not end.has_credit:
                yield end


def make_posts(
    plan: PhysicalPlan,
    thread: ThreadId,
    communicator: Communicator,
    ranks_here: Collection[int],
    turn: threading.Lock,
    make_segment: SegmentMaker | None = None,
) -> dict[str, Post]:
    """Return the post of every actor of one thread, by name.

    Ranks of other processes send no acknowledgements. So a send counts the credits of its links to
    them: it waits until the message that is `quota` messages older has been asked for.

    Args:
        plan: A plan with firing orders.
        thread: The thread.
        communicator: The communicator of its rank.
        ranks_here: Ranks of this process.
        turn: See `work_of`.
        make_segment: Makes the functions of segments; None for generated Python.

    Raises:
        GraphError: torch lacks an operator that a segment calls.
    """
    rank, name = thread
    part = plan.by_rank[rank]
    thread_actors = [actor for actor in part.actors if actor.thread == name]
    names = {actor.name for actor in thread_actors}
    sends: dict[str, list[Channel]] = defaultdict(list)
    receives: dict[str, list[Channel]] = defaultdict(list)
    for link in plan.links:
        if link.sender[0] == rank and link.sender[1] in names and link.receiver[0] in ranks_here:
            sends[link.sender[1]].append(link)
        if link.receiver[0] == rank and link.receiver[1] in names and link.sender[0] in ranks_here:
            receives[link.receiver[1]].append(link)
    return {
        actor.name: Post(
            actor=actor,
            work=work_of(actor, plan, communicator, turn, make_segment),
            inputs=_inputs(plan, part, actor),
            outputs=_outputs(plan, part, actor),
            sends=_link_ends(plan, sends[actor.name]),
            receives=tuple(
                (link.name, _thread(plan, link.sender)) for link in receives[actor.name]
            ),
            is_boxing=isinstance(actor, BoxingActor),
        )
        for actor in thread_actors
    }


def _inputs(plan: PhysicalPlan, part: RankPlan, actor: Actor) -> tuple[InRegister, ...]:
    return tuple(
        InRegister(
            register.name,
            (part.rank, part.by_name[register.producer].thread),
            dict(zip(register.carries, register.keys, strict=bool(register.carries))),
            initial=register.initial,
            uses=plan.firings_per_filling(actor, register),
            is_begun=part.by_name[register.producer].overlaps,
        )
        for register in part.inputs_of[actor.name]
    )


def _outputs(plan: PhysicalPlan, part: RankPlan, actor: Actor) -> tuple[OutRegister, ...]:
    return tuple(
        OutRegister(
            register.name,
            register.quota,
            {reader: (part.rank, part.by_name[reader].thread) for reader in register.consumers},
            register.keys,
            initial=register.initial,
            num_taken=plan.repetitions[register.rate] - register.initial
            if register.carries
            else None,
            firings=plan.firings_per_filling(actor, register),
        )
        for register in part.outputs_of[actor.name]
    )


def _link_ends(plan: PhysicalPlan, links: Iterable[Channel]) -> tuple[OutRegister, ...]:
    return tuple(
        OutRegister(link.name, link.quota, {link.receiver[1]: _thread(plan, link.receiver)})
        for link in links
    )


def _thread(plan: PhysicalPlan, actor_id: ActorId) -> ThreadId:
    rank, name = actor_id
    return rank, plan.by_rank[rank].by_name[name].thread
