"""Plans of a few actors, written by hand, and the order in which they fire."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sbp_core.boxing import route
from sbp_core.compile.actors import Actor, ActorId, Compute, Instruction, Receive, Send
from sbp_core.compile.commit import commit_step
from sbp_core.compile.physical import Channel, PhysicalPlan, RankPlan, Register
from sbp_core.graph.ir import GraphOutput, InputKind, LogicalGraph, OutputKind, Phase, Rate, Ref
from sbp_core.interpreter.firings import firing_order
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, S
from sbp_core.testing.graphs import Builder

PAIR = Placement.grid((2,), ("ranks",))

_REDUCE = commit_step([PAIR])
assert _REDUCE is not None

#: Boxing steps of all plans: an all-reduce and an all-gather of both ranks, transfers from rank 0
#: to rank 1 of four elements, and of none.
STEPS = (
    _REDUCE,
    *route((4,), "float32", (PAIR, NdSbp(S(0))), (PAIR, NdSbp(B))).steps,
    *(
        route((size,), "float32", *((Placement([rank]), NdSbp(B)) for rank in (0, 1))).steps[0]
        for size in (4, 0)
    ),
)
REDUCE, GATHER, SEND, SEND_NOTHING = range(4)


def with_mean() -> LogicalGraph:
    """Return a step of two micro-batches that hands a running mean from one to the other."""
    b = Builder()
    b.add_input("mean", InputKind.BUFFER, (4,))
    b.add_input("w", InputKind.PARAMETER, (4,))
    b.add_input("x", InputKind.BATCH, (4,))
    b.op("next", "lerp.Scalar", (Ref("mean"), Ref("x"), 0.1), (4,), pointwise=True)
    for name, op, of, phase in (
        ("g", "mul.Tensor", "x", Phase.BACKWARD),
        ("new", "sub.Tensor", "g", Phase.OPTIMIZER),
    ):
        b.op(name, op, (Ref("w"), Ref(of)), (4,), phase=phase, pointwise=True)
    for state, value in (("mean", "next"), ("w", "new")):
        b.outputs.append(GraphOutput(name=state, kind=OutputKind.STATE, value=value))
    return accumulate(b.graph(), 2)


def call(op: str, takes: str, makes: str) -> Instruction:
    """Return an instruction on keys."""
    return Instruction(op=f"aten.{op}", args=tuple(map(Ref, takes.split())), outputs=(makes,))


def segment(name: str, *calls: Instruction, **parts: Any) -> Compute:
    """Return a segment that fires once a step, on the thread `compute` if no other is given."""
    given: dict[str, Any] = {"thread": "compute", "rate": Rate.STEP, **parts}
    return Compute(name=name, stage=0, phase=Phase.OPTIMIZER, instructions=calls, **given)


def boxing(kind: type[Actor], name: str, step: int, **parts: Any) -> Any:
    """Return a boxing actor that fires once a step; what it makes is called as it is."""
    given: dict[str, Any] = {"thread": "compute", "rate": Rate.STEP, **parts}
    if kind is not Send:
        given["makes"] = name.removeprefix("receive ")
    return kind(name=name, stage=0, phase=Phase.OPTIMIZER, step=step, **given)


def part(rank: int, *actors: Actor, registers: Sequence[Register] = ()) -> RankPlan:
    """Return the part of a rank, whose threads fire actors in the order in which they are given."""
    orders: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for actor in actors:
        orders[actor.thread].append((actor.name, 0))
    return RankPlan(
        rank=rank,
        slots=(),
        actors=actors,
        registers=tuple(registers),
        orders={thread: tuple(order) for thread, order in orders.items()},
    )


def register(producer: str, consumer: str, *keys: str) -> Register:
    """Return a register that is filled once a step."""
    return Register(
        name=f"{producer}>{consumer}", producer=producer, consumers=(consumer,), keys=keys,
        rate=Rate.STEP, quota=1,
    )  # fmt: skip


def plan_of(*parts: RankPlan) -> PhysicalPlan:
    """Return a plan of one micro-batch, with links from `send x` to `receive x`."""
    links = [
        Channel(
            name=actor.name,
            sender=(one.rank, actor.name),
            receiver=(other.rank, receive.name),
            quota=1,
        )
        for one in parts
        for actor in one.actors
        if isinstance(actor, Send)
        for other in parts
        for receive in other.actors
        if isinstance(receive, Receive) and receive.step == actor.step
    ]
    return PhysicalPlan(
        graph_hash="", planner="by hand", num_micro_batches=1, ties={}, stages=(PAIR,),
        steps=STEPS, links=tuple(links), ranks=parts,
    )  # fmt: skip


def firings_of(
    plan: PhysicalPlan, stands_for: Mapping[int, int] = MappingProxyType({})
) -> list[ActorId]:
    """Return all firings of a step, in an order in which they may happen.

    Args:
        plan: The plan.
        stands_for: Of one rank of each class, which one each rank is represented by.
    """
    order = firing_order(plan, stands_for)
    assert order is not None, "the plan comes to its end"
    return [actor_id for group in order for actor_id in group]
