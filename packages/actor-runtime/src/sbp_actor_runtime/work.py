"""The work of one firing: call a generated segment, sum, or take part in a boxing step.

Knows no registers and no threads: values in, values out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sbp_actor_runtime.message import StepOrder, Values
from sbp_core.boxing import Communicator
from sbp_core.compile import (
    Accumulate,
    Actor,
    BoxingActor,
    Collective,
    Compute,
    PhysicalPlan,
    Receive,
    Send,
    keys_out,
)
from sbp_torch.runtime import Accumulation
from sbp_torch.segments import SegmentMaker, segment_function

#: (index of the micro-batch, values taken, order of the step) -> values made.
Work = Callable[[int, Values, StepOrder], Values]


def work_of(
    actor: Actor,
    plan: PhysicalPlan,
    communicator: Communicator,
    make_segment: SegmentMaker | None = None,
) -> Work:
    """Return what an actor of the communicator's rank does in a firing.

    Args:
        actor: The actor.
        plan: That it is in.
        communicator: Of its rank.
        make_segment: Makes the functions of segments; None for generated Python.
    """
    if isinstance(actor, Compute):
        return _segment(actor, plan, communicator.rank, make_segment)
    if isinstance(actor, Accumulate):
        return _accumulation(actor, plan)
    if isinstance(actor, Send):
        return _send(actor, plan, communicator)
    if isinstance(actor, Receive):
        return _receive(actor, plan, communicator)
    return _collective(actor, plan, communicator)


def _segment(
    actor: Compute, plan: PhysicalPlan, rank: int, make_segment: SegmentMaker | None
) -> Work:
    make = make_segment or partial(segment_function, owns=True)
    function = make(actor, rank, plan.steps)
    taken = (*actor.inputs, *actor.reads)
    made = keys_out(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        # Handed over, so that each value can die inside, after its last use.
        return dict(zip(made, function([values.pop(key) for key in taken]), strict=True))

    return run


def _accumulation(actor: Accumulate, plan: PhysicalPlan) -> Work:
    sums = Accumulation(actor, plan.num_micro_batches)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        return dict(sums.add(index, values))

    return run


def _tag(actor: BoxingActor) -> Callable[[int, StepOrder], str]:
    """Return how a firing is called, equally on every rank that takes part."""
    name = actor.name.removeprefix("send ").removeprefix("receive ")
    return lambda index, order: f"{name}, micro-batch {index} of step {order.index}"


def _send(actor: Send, plan: PhysicalPlan, communicator: Communicator) -> Work:
    step, tag = plan.steps[actor.step], _tag(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        (shard,) = values.values()
        communicator.send(step, shard, tag=tag(index, order), deadline_s=order.deadline_s)
        return {}

    return run


def _receive(actor: Receive, plan: PhysicalPlan, communicator: Communicator) -> Work:
    step, tag = plan.steps[actor.step], _tag(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        own = next(iter(values.values()), None)
        part = communicator.receive(step, own, tag=tag(index, order), deadline_s=order.deadline_s)
        return {actor.makes: part}

    return run


def _collective(actor: Collective, plan: PhysicalPlan, communicator: Communicator) -> Work:
    step, tag = plan.steps[actor.step], _tag(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        (shard,) = values.values()
        part = communicator.collective(
            step, shard, tag=tag(index, order), deadline_s=order.deadline_s
        )
        return {actor.makes: part}

    return run
