"""What is legal in a `PhysicalPlan` as it stands, before a step of it is replayed.

A plan may come from a file that somebody edited. What replays it (`sbp_core.check`) and what runs
it rely on what is checked here; that it comes to an end is checked by replaying it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.liveness import keys_out
from sbp_core.compile.physical import (
    Accumulate,
    Actor,
    Channel,
    Compute,
    PhysicalPlan,
    RankPlan,
    Receive,
    Send,
    StateSlot,
)
from sbp_core.errors import PlanError, SbpValueError
from sbp_core.graph.ir import ITEMSIZE, Ref, refs
from sbp_core.graph.primitives import LOCAL_BOX
from sbp_core.placement import Placement
from sbp_core.sbp import check_sbp, local_shape


def verify_plan(plan: PhysicalPlan) -> PhysicalPlan:
    """Check a plan against its specification and return it.

    1. There is at least one micro-batch. Ranks are listed once, and so is every name on a rank.
    2. Steps move tensors that there can be, between nd-SBPs that fit them, along axes of the mesh.
    3. A slot is on a stage of its rank and holds the part of its tensor that its nd-SBP says.
    4. Stages and boxing steps that actors name are there, and no size is negative.
    5. A compute segment uses what it takes and what it has made; what leaves it was taken or made.
       A boxing actor takes one shard, an accumulation the parts that it sums; they make what they
       say, and nothing else leaves them.
    6. Links lead from an actor that sends to one that receives.

    Raises:
        PlanError: names the rank and the part, and what it breaks.
    """
    if plan.num_micro_batches < 1:
        raise PlanError(
            f"{plan.num_micro_batches} micro-batches", where="the plan", accepted="at least one"
        )
    _check_once("ranks", (part.rank for part in plan.ranks), "the plan")
    for index, step in enumerate(plan.steps):
        _check_step(step, f"boxing step {index}")
    for part in plan.ranks:
        where = f"rank {part.rank}"
        _check_once("actors", (actor.name for actor in part.actors), where)
        _check_once("registers", (register.name for register in part.registers), where)
        _check_once("slots", (slot.name for slot in part.slots), where)
        for slot in part.slots:
            _check_slot(plan, part, slot)
        for actor in part.actors:
            _check_actor(plan, actor, f"actor {actor.name!r} of rank {part.rank}")
    for link in plan.links:
        _check_link(plan, link)
    return plan


def _check_once(what: str, names: Iterable[str | int], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError(f"two {what} are called {twice[0]!r}", where=where, accepted="each once")


def _check_tensor(shape: tuple[int, ...], dtype: str, where: str) -> None:
    if dtype not in ITEMSIZE or any(extent < 0 for extent in shape):
        raise PlanError(
            f"a tensor {dtype}{list(shape)}",
            where=where,
            accepted=f"extents >= 0, and one of {', '.join(ITEMSIZE)}",
        )


def _check_step(step: BoxingStep, where: str) -> None:
    _check_tensor(step.shape, step.dtype, where)
    for placement, sbp in (step.source, step.target):
        try:
            check_sbp(step.shape, sbp, placement.mesh_shape)
        except SbpValueError as error:
            raise PlanError(error.what, where=where, accepted=error.accepted) from error
    num_axes = step.source[0].num_axes
    if any(axis not in range(num_axes) for axis in step.axes) or step.size_bytes < 0:
        raise PlanError(
            f"axes {list(step.axes)} of a mesh of {num_axes}, {step.size_bytes} bytes",
            where=where,
            accepted="axes of the mesh, 0 bytes or more",
        )


def _check_slot(plan: PhysicalPlan, part: RankPlan, slot: StateSlot) -> None:
    where = f"slot {slot.name!r} of rank {part.rank}"
    stage = _stage(plan, slot.stage, where)
    if slot.sbp is None:
        return
    _check_tensor(slot.shape, slot.dtype, where)
    if part.rank not in stage:
        raise PlanError(
            f"stage {slot.stage} is not on this rank",
            where=where,
            accepted=", ".join(map(str, stage.rank_list)),
        )
    try:
        held = local_shape(slot.shape, slot.sbp, stage.mesh_shape, stage.coordinate(part.rank))
    except SbpValueError as error:
        raise PlanError(error.what, where=where, accepted=error.accepted) from error
    if slot.local_shape != held:
        raise PlanError(f"a part of shape {slot.local_shape}", where=where, accepted=str(held))


def _stage(plan: PhysicalPlan, stage: int, where: str) -> Placement:
    if stage not in range(len(plan.stages)):
        accepted = f"0 .. {len(plan.stages) - 1}"
        raise PlanError(f"there is no stage {stage}", where=where, accepted=accepted)
    return plan.stages[stage]


def _check_actor(plan: PhysicalPlan, actor: Actor, where: str) -> None:
    _stage(plan, actor.stage, where)
    taken = {*actor.inputs, *actor.reads}
    if isinstance(actor, Compute):
        known = _check_segment(plan, actor, where)
    elif isinstance(actor, Accumulate):
        parts = {part for part, _, _ in actor.accumulates}
        if not parts <= taken:
            raise _unknown(parts - taken, "it sums", where)
        known = {total for _, total, _ in actor.accumulates}
    else:
        if len(taken) > 1 or (not taken and not isinstance(actor, Receive)):
            raise PlanError(f"boxes {sorted(taken)}", where=where, accepted="one shard")
        known = set() if isinstance(actor, Send) else {actor.makes}
    leaving = set(keys_out(actor))
    if not leaving <= known:
        raise _unknown(leaving - known, "it hands on", where)


def _check_segment(plan: PhysicalPlan, actor: Compute, where: str) -> set[str]:
    """Return all keys that are there when a segment ends."""
    known = {*actor.inputs, *actor.reads}
    for instruction in actor.instructions:
        used = {ref.name for ref in refs((instruction.args, tuple(instruction.kwargs.values())))}
        if not used <= known:
            raise _unknown(used - known, f"{instruction.op} uses", where)
        if instruction.op == LOCAL_BOX:
            _check_local_box(plan, instruction.args, where)
        known.update(instruction.outputs)
    return known


def _unknown(names: set[str], what: str, where: str) -> PlanError:
    return PlanError(
        f"{what} {min(names)!r}, which is not there",
        where=where,
        accepted="what it takes from registers, reads, or has made before",
    )


def _check_local_box(plan: PhysicalPlan, args: tuple[object, ...], where: str) -> None:
    fits = len(args) == 2 and isinstance(args[0], Ref) and type(args[1]) is int
    if not fits or args[1] not in range(len(plan.steps)):
        raise PlanError(
            f"{LOCAL_BOX} of {args}",
            where=where,
            accepted=f"a value, and the number of a boxing step below {len(plan.steps)}",
        )


def _check_link(plan: PhysicalPlan, link: Channel) -> None:
    for (rank, name), kind in ((link.sender, Send), (link.receiver, Receive)):
        part = plan.by_rank.get(rank)
        actor = None if part is None else part.by_name.get(name)
        if not isinstance(actor, kind):
            raise PlanError(
                f"rank {rank} has no {kind.__name__.lower()} {name!r}",
                where=f"link {link.name!r}",
                accepted="an actor that sends and one that receives",
            )
