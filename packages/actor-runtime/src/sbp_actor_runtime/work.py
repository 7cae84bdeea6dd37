"""The work of one firing: call a generated segment, sum, or take part in a boxing step.

Knows no registers and no threads: values in, values out. Knows torch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sbp_actor_runtime.message import StepOrder, Values
from sbp_core.boxing.backend import Communicator
from sbp_core.compile.physical import Actor, ActorKind, PhysicalPlan
from sbp_core.runtime.codegen import keys_out, segment_function

#: (index of the micro-batch, values taken, order of the step) -> values made.
Work = Callable[[int, Values, StepOrder], Values]


def work_of(actor: Actor, plan: PhysicalPlan, communicator: Communicator) -> Work:
    """Return what an actor of the communicator's rank does in a firing."""
    if actor.kind is ActorKind.COMPUTE:
        return _segment(actor, plan, communicator.rank)
    if actor.kind is ActorKind.ACCUMULATE:
        return _Accumulation(actor, plan.num_micro_batches)
    if actor.kind is ActorKind.SEND:
        return _send(actor, plan, communicator)
    if actor.kind is ActorKind.RECEIVE:
        return _receive(actor, plan, communicator)
    return _collective(actor, plan, communicator)


def _segment(actor: Actor, plan: PhysicalPlan, rank: int) -> Work:
    function = segment_function(actor, rank, plan.steps)
    taken = (*actor.inputs, *actor.reads)
    made = keys_out(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        return dict(zip(made, function(*map(values.__getitem__, taken)), strict=True))

    return run


class _Accumulation:
    """Sums over the micro-batches of a step, in their order."""

    def __init__(self, actor: Actor, num_micro_batches: int) -> None:
        self.parts = actor.accumulates
        self.last = num_micro_batches - 1
        self.sums: dict[str, Tensor] = {}

    def __call__(self, index: int, values: Values, order: StepOrder) -> Values:
        for part, total, scale in self.parts:
            scaled = values[part] * scale
            # The first micro-batch begins anew, whatever a step that failed has left.
            self.sums[total] = self.sums[total] + scaled if index else scaled
        if index < self.last:
            return {}
        made, self.sums = self.sums, {}
        return dict(made)


def _tag(actor: Actor) -> Callable[[int, StepOrder], str]:
    """Return how a firing is called, equally on every rank that takes part."""
    name = actor.name.removeprefix("send ").removeprefix("receive ")
    return lambda index, order: f"{name}, micro-batch {index} of step {order.index}"


def _send(actor: Actor, plan: PhysicalPlan, communicator: Communicator) -> Work:
    step, tag = plan.steps[actor.step], _tag(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        (shard,) = values.values()
        communicator.send(step, shard, tag=tag(index, order), deadline_s=order.deadline_s)
        return {}

    return run


def _receive(actor: Actor, plan: PhysicalPlan, communicator: Communicator) -> Work:
    step, tag = plan.steps[actor.step], _tag(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        own = next(iter(values.values()), None)
        part = communicator.receive(step, own, tag=tag(index, order), deadline_s=order.deadline_s)
        return {actor.makes: part}

    return run


def _collective(actor: Actor, plan: PhysicalPlan, communicator: Communicator) -> Work:
    step, tag = plan.steps[actor.step], _tag(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        (shard,) = values.values()
        part = communicator.collective(
            step, shard, tag=tag(index, order), deadline_s=order.deadline_s
        )
        return {actor.makes: part}

    return run
