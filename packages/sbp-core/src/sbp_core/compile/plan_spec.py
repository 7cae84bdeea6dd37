"""Check that a compiled plan is well-formed: names, shapes and links, without replaying a step.

A plan may come from a file that somebody edited. The replay (`sbp_core.check`) and the runtimes
rely on the checks made here; only the replay can tell whether the plan comes to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from sbp_core.boxing.step import StepKind
from sbp_core.boxing.step_spec import verify_step
from sbp_core.compile.actors import Accumulate, Actor, Compute, Receive, Send, keys_out
from sbp_core.compile.dataflow import may_be_view
from sbp_core.compile.overwriting import is_in_place, written_keys
from sbp_core.compile.physical import PhysicalPlan, RankPlan, StateSlot
from sbp_core.errors import PlanError, SbpValueError
from sbp_core.graph.ir import ITEMSIZE, InputKind, Rate, Ref, refs
from sbp_core.graph.primitives import LOCAL_BOX, STACK
from sbp_core.placement import Placement
from sbp_core.sbp import local_shape

#: Kinds of devices that a plan may be for.
_DEVICES = ("cpu", "cuda")

#: How an accumulation combines several parts, apart from a factor.
_HOWS = ("maximum", "minimum", STACK)


def verify_plan(plan: PhysicalPlan) -> PhysicalPlan:
    """Check a plan against its specification and return it.

    1. There is at least one micro-batch. Ranks are listed once, and so is every name on a rank.
    2. Boxing steps are legal steps of routes (`boxing.step_spec`).
    3. A slot is on a stage of its rank and holds the part of its tensor that its nd-SBP gives.
    4. Stages and boxing steps that actors name exist, and no size is negative.
    5. A compute segment uses only its inputs and its own results; its outputs are among these.
       A boxing actor takes one shard, an accumulation the parts that it sums; they make their
       declared results, and nothing else leaves them. An instruction overwrites only a state that
       the actor overwrites, a result of the segment, or a copy of an offloaded state that is
       donated to it. States are overwritten by actors that fire once a step.
    6. Links lead from an actor that sends to an actor that receives the same message, once.
    7. Slots of one name are one graph input on all ranks, and every holder of a part has a plan.
       Actors write states that their rank holds, one actor each; likewise results. Ties map host
       states to states that have no other tie.
    8. All stages have one kind of device.

    Raises:
        PlanError: names the rank and the part, and the rule that it breaks.
    """
    if plan.num_micro_batches < 1:
        raise PlanError(
            f"{plan.num_micro_batches} micro-batches", where="the plan", accepted="at least one"
        )
    _check_once("ranks", (part.rank for part in plan.ranks), "the plan")
    for index, step in enumerate(plan.steps):
        try:
            verify_step(step)
        except SbpValueError as error:
            raise error.replaced(PlanError, where=f"boxing step {index}") from error
    # Shared objects are checked once, except for the position of a rank in its tensors.
    seen: set[tuple[int, ...]] = set()
    cuts: dict[int, list[StateSlot]] = {}
    for part in plan.ranks:
        where = f"rank {part.rank}"
        shared = id(part.slots), id(part.actors), id(part.registers)
        if shared not in seen:
            for what in ("actors", "registers", "slots"):
                _check_once(what, (one.name for one in getattr(part, what)), where)
        if id(part.slots) not in cuts:
            # The first of all slots that are equal in everything that `_check_slot` checks.
            alike: dict[object, StateSlot] = {}
            for slot in part.slots:
                key = slot.stage, slot.shape, slot.dtype, slot.sbp, slot.local_shape
                alike.setdefault(key, slot)
            cuts[id(part.slots)] = list(alike.values())
        for slot in cuts[id(part.slots)]:
            _check_slot(plan, part, slot)
        if shared in seen:
            continue
        seen.add(shared)
        states = {slot.name for slot in part.slots if slot.kind.is_state}
        numbers = {slot.name for slot in part.slots if slot.sbp is None}
        for actor in part.actors:
            where = f"actor {actor.name!r} of rank {part.rank}"
            _check_actor(plan, actor, where)
            _check_writes(states, numbers, actor, where)
        for what in ("emits", "writes"):
            names = [name for actor in part.actors for name, _ in getattr(actor, what)]
            _check_once(f"{what} of actors", names, f"rank {part.rank}")
    _check_links(plan)
    _check_inputs(plan)
    _check_ties(plan)
    kinds = sorted({stage.device for stage in plan.stages})
    if len(kinds) != 1 or kinds[0] not in _DEVICES:
        raise PlanError(
            f"the plan is for devices of kind {', '.join(kinds) or 'none'}",
            where="its stages",
            accepted=" on all stages, or ".join(_DEVICES),
        )
    return plan


def _check_once(what: str, names: Iterable[str | int], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError(f"two {what} are called {twice[0]!r}", where=where, accepted="each once")


def _check_slot(plan: PhysicalPlan, part: RankPlan, slot: StateSlot) -> None:
    where = f"slot {slot.name!r} of rank {part.rank}"
    stage = _stage(plan, slot.stage, where)
    if slot.sbp is None:
        return
    if slot.dtype not in ITEMSIZE or any(extent < 0 for extent in slot.shape):
        raise PlanError(
            f"a tensor {slot.dtype}{list(slot.shape)}",
            where=where,
            accepted=f"extents >= 0, and one of {', '.join(ITEMSIZE)}",
        )
    if part.rank not in stage:
        raise PlanError(
            f"stage {slot.stage} is not on this rank",
            where=where,
            accepted=", ".join(map(str, stage.rank_list)),
        )
    try:
        held = local_shape(slot.shape, slot.sbp, stage.mesh_shape, stage.coordinate(part.rank))
    except SbpValueError as error:
        raise error.replaced(PlanError, where=where) from error
    if slot.local_shape != held:
        raise PlanError(f"a part of shape {slot.local_shape}", where=where, accepted=str(held))


def _check_inputs(plan: PhysicalPlan) -> None:
    """Check that slots of one name belong to one graph input, and that all holders have a plan."""
    met: dict[str, tuple[int, StateSlot]] = {}
    few = {id(part.slots): part for part in reversed(plan.ranks)}  # the first that has them
    for part in reversed(few.values()):
        for slot in part.slots:
            rank, first = met.setdefault(slot.name, (part.rank, slot))
            # Every stage that computes with a host number has it.
            stage = slot.stage if slot.sbp is not None else first.stage
            if replace(slot, stage=stage, local_shape=first.local_shape) != first:
                raise PlanError(
                    "ranks hold different inputs by this name",
                    where=f"slot {slot.name!r} of rank {part.rank}, and of rank {rank}",
                    accepted="one kind, shape, dtype, stage and SBP",
                )
    known = plan.by_rank.keys()
    for name, (_, slot) in met.items():
        holders = () if slot.sbp is None else plan.stages[slot.stage].rank_list
        if gone := [rank for rank in holders if rank not in known]:
            raise PlanError(
                f"rank {gone[0]} holds a part of it and has no plan",
                where=f"slot {name!r}",
                accepted=", ".join(map(str, known)),
            )
        if slot.sbp is None and slot.kind is InputKind.BATCH:
            raise PlanError("a batch tensor without an SBP", where=f"slot {name!r}")


def _check_ties(plan: PhysicalPlan) -> None:
    """Check that ties belong to host numbers, and stand for states that have no other tie."""
    few = {id(part.slots): part.slots for part in plan.ranks}  # many ranks share them
    slots = {slot.name: slot for shared in few.values() for slot in shared}
    names = Counter(slot.name for slot in slots.values() if slot.name not in plan.ties)
    for name, tied in plan.ties.items():
        slot = slots.get(name)
        if slot is None or slot.sbp is not None or not slot.kind.is_state or not tied:
            raise PlanError(
                f"{name!r} is tied to {list(tied)[:3]}",
                where="ties",
                accepted="host numbers that are states, each for one state or more",
            )
        names.update(tied)
    _check_once("states", names.elements(), "the plan, ties included")


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
        _check_overwriting(actor, where)
    elif isinstance(actor, Accumulate):
        hows = [how for _, _, how in actor.accumulates if isinstance(how, str)]
        if unknown := set(hows).difference(_HOWS):
            raise PlanError(
                f"it sums by {min(unknown)!r}",
                where=where,
                accepted=f"a factor, null, {', '.join(_HOWS)}",
            )
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


def _check_writes(states: set[str], numbers: set[str], actor: Actor, where: str) -> None:
    """Check that an actor writes states, some of them in place, but no host numbers in place."""
    written = {state for state, _ in actor.writes}
    if not states >= written or not written - numbers >= set(actor.in_place):
        raise PlanError(
            f"writes {sorted(written)}, and {list(actor.in_place)} in place",
            where=where,
            accepted="states that this rank holds; in place some tensors of those that it writes",
        )
    if actor.in_place and actor.rate is not Rate.STEP:
        raise PlanError(
            f"overwrites {actor.in_place[0]!r} in place for each micro-batch",
            where=where,
            accepted="in_place for actors of rate 'step' only; the last value of other actors "
            "becomes the state after the step",
        )


def _check_segment(plan: PhysicalPlan, actor: Compute, where: str) -> set[str]:
    """Return all keys that exist when a segment ends."""
    known = {*actor.inputs, *actor.reads}
    for instruction in actor.instructions:
        parts = instruction.op.split(".")
        if len(parts) < 2 or not all(map(str.isidentifier, parts)):
            raise PlanError(
                f"{instruction.op!r} is no operator name",
                where=where,
                accepted="namespace.operator[.overload]",
            )
        strange = [name for name in instruction.kwargs if not name.isidentifier()]
        if strange or (instruction.kwargs and instruction.op == LOCAL_BOX):
            raise PlanError(
                f"{instruction.op} takes no argument {min(strange or instruction.kwargs)!r}",
                where=where,
                accepted=f"names of arguments; none for {LOCAL_BOX}",
            )
        used = {ref.name for ref in refs((instruction.args, tuple(instruction.kwargs.values())))}
        if not used <= known:
            raise _unknown(used - known, f"{instruction.op} uses", where)
        args = instruction.args
        if instruction.op == LOCAL_BOX and not (
            len(args) == 2
            and isinstance(args[0], Ref)
            and type(args[1]) is int
            and args[1] in range(len(plan.steps))
            and plan.steps[args[1]].kind is StepKind.LOCAL
        ):
            local = [str(i) for i, step in enumerate(plan.steps) if step.kind is StepKind.LOCAL]
            raise PlanError(
                f"{LOCAL_BOX} of {args}",
                where=where,
                accepted=f"a value, and the number of a local step: {', '.join(local[:20])}",
            )
        for name in instruction.outputs:
            if name in known:
                raise PlanError(
                    f"{instruction.op} makes {name!r}, which is there already",
                    where=where,
                    accepted="another name for each value of a segment",
                )
            known.add(name)
    return known


def _check_overwriting(actor: Compute, where: str) -> None:
    """Check that no value is overwritten that other actors hold.

    before: y = add_(x, 1)    x is taken from a register, or read and not in `in_place`: refused
    """
    # Other actors hold values that come by a register, under whatever name, unless donated.
    own = set(actor.in_place).difference(actor.inputs).union(actor.donated)
    for instruction in actor.instructions:
        if not is_in_place(instruction.op):
            # A view of another actor's memory does not belong to the segment.
            if not may_be_view(instruction.op):
                own.update(instruction.outputs)
            continue
        names = written_keys(instruction)
        if len(names) != max(1, len(instruction.outputs)) or not own.issuperset(names):
            raise PlanError(
                f"{instruction.op} writes over {', '.join(names) or 'nothing that it may'}",
                where=where,
                accepted="operators with a form in place, on states that the actor overwrites",
            )
        own.update(instruction.outputs)


def _unknown(names: set[str], what: str, where: str) -> PlanError:
    return PlanError(
        f"{what} {min(names)!r}, which is not there",
        where=where,
        accepted="what it takes from registers, reads, or has made before",
    )


def _check_links(plan: PhysicalPlan) -> None:
    """Check that each link leads from a send to the receive of its message, and that none is twice.

    The two ends use the same name for a message.
    """
    for link in plan.links:
        where = f"link {link.name!r}"
        ends: list[Send | Receive] = []
        for (rank, name), kind in ((link.sender, Send), (link.receiver, Receive)):
            part = plan.by_rank.get(rank)
            actor = None if part is None else part.by_name.get(name)
            if not isinstance(actor, kind):
                raise PlanError(
                    f"rank {rank} has no {kind.__name__.lower()} {name!r}",
                    where=where,
                    accepted="an actor that sends and one that receives",
                )
            ends.append(actor)
        sends, receives = ends
        what, other = ((end.message, end.step, end.rate) for end in ends)
        if what != other:
            raise PlanError(
                f"{sends.name!r} does step {sends.step} at rate {sends.rate.value!r}, "
                f"{receives.name!r} step {receives.step} at rate {receives.rate.value!r}",
                where=where,
                accepted="one step at one rate, by 'send NAME' and 'receive NAME'",
            )
    pairs = [(*link.sender, "to", *link.receiver) for link in plan.links]
    _check_once("links", (" ".join(map(str, pair)) for pair in pairs), "the plan")
