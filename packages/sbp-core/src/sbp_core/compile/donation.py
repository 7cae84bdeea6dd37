"""Let new values of states take the memory of the old ones, where nobody looks at it any more.

before: a = addcdiv(v, ...); b = addcdiv(w, ...)       [kept to the end of the step, beside v, w]
after:  a = addcdiv(v, ...); v <- a; b = addcdiv(w, ...); w <- b            (`Actor.in_place`)

A segment writes each state as soon as nothing of it looks at the old value any more, so that new
values need not be there together. What a boxing step makes is copied after its firing. A step that
fails after the first such write leaves states of two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sbp_core.compile.liveness import keys_in
from sbp_core.compile.physical import (
    Actor,
    Compute,
    Instruction,
    PhysicalPlan,
    RankPlan,
    Send,
)
from sbp_core.graph.ir import Rate, Ref, refs
from sbp_core.graph.primitives import LOCAL_BOX, OVERWRITE
from sbp_core.signatures.views import is_view


def donate_states(plan: PhysicalPlan) -> PhysicalPlan:
    """Return the plan with `in_place` set on every actor that may overwrite states.

    A state is overwritten after the firing that makes its new value, once a step, if on that rank
    only compute segments read it or look at its memory, and all of them have fired before, on the
    same thread; no result and no other state looks at it.

    Args:
        plan: With firing orders.
    """
    return replace(plan, ranks=tuple(_of_rank(plan, part) for part in plan.ranks))


def _of_rank(plan: PhysicalPlan, part: RankPlan) -> RankPlan:
    # An order lists every firing, so the last one of each actor is what remains.
    last_firing = {
        name: (thread, number)
        for thread, order in part.orders.items()
        for number, (name, _) in enumerate(order)
    }
    tensors = {slot.name: slot for slot in part.slots if slot.sbp is not None}
    views = _views(part, set(tensors))
    actors: list[Actor] = []
    for actor in part.actors:
        states = [name for name, _ in actor.writes if name in tensors]
        taken: tuple[str, ...] = ()
        # What is written for each micro-batch goes on to the next through a register instead.
        if actor.rate is Rate.STEP:
            taken = tuple(s for s in states if _is_free(part, actor, s, views, last_firing))
        if isinstance(actor, Compute) and taken:
            actor = _overwriting(replace(actor, in_place=taken), views)
        elif not isinstance(actor, Send) and taken:
            actor = replace(actor, in_place=taken)
        actors.append(actor)
    return replace(part, actors=tuple(actors))


def _overwriting(actor: Compute, views: Mapping[str, set[str]]) -> Compute:
    """Return a segment that writes its states itself, each after the last look at its memory."""
    # A new value goes over the old one as soon as both hold: it is made, and nothing of the segment
    # looks at the old one any more.
    #
    #     0  t = view(w)
    #     1  a = addcdiv(w, ..)    <- a is made here
    #     2  n = norm(t)           <- the last look at the memory of w
    #     -  w <- a                after instruction 2; a dies here, not at the end of the step
    made = {key: at for at, entry in enumerate(actor.instructions) for key in entry.outputs}
    behind: dict[int, list[Instruction]] = defaultdict(list)
    writes = []
    for state, key in actor.writes:
        if state in actor.in_place and key in made:
            looks = [
                at
                for at, entry in enumerate(actor.instructions)
                if any(state in views.get(name, ()) for name in keys_in(entry))
            ]
            done = f"{state} <- {key}"
            at = max((made[key], *looks))
            behind[at].append(
                Instruction(
                    op=OVERWRITE,
                    args=(Ref(state), Ref(key)),
                    outputs=(done,),
                    node=actor.instructions[made[key]].node,
                )
            )
            # What leaves the segment as the state's new value is the old memory, written anew.
            key = done
        writes.append((state, key))
    return replace(
        actor,
        # To be written, the old value must be at hand, even if no instruction computes with it.
        reads=tuple(dict.fromkeys((*actor.reads, *actor.in_place))),
        writes=tuple(writes),
        instructions=tuple(
            part for at, entry in enumerate(actor.instructions) for part in (entry, *behind[at])
        ),
    )


def _views(part: RankPlan, states: set[str]) -> dict[str, set[str]]:
    """Return for each key that may lie in the memory of states, which; states lie in their own."""
    found: dict[str, set[str]] = {name: {name} for name in states}
    changed = True
    while changed:
        # Until nothing changes: a view may go to an actor that is listed before its maker.
        changed = False
        for actor in part.actors:
            for entry in actor.instructions if isinstance(actor, Compute) else ():
                # A local step may slice, which only looks.
                if entry.op != LOCAL_BOX and not is_view(entry.op):
                    continue
                seen = {s for ref in refs(entry.args) for s in found.get(ref.name, ())}
                for key in entry.outputs:
                    if not seen <= found.get(key, set()):
                        found[key] = found.get(key, set()) | seen
                        changed = True
    return found


def _is_free(
    part: RankPlan,
    writer: Actor,
    state: str,
    views: Mapping[str, set[str]],
    last_firing: Mapping[str, tuple[str, int]],
) -> bool:
    """Whether nobody looks at the memory of a state once its writer has fired."""

    def looks(keys: Sequence[str]) -> bool:
        return any(state in views.get(key, ()) for key in keys)

    thread, when = last_firing[writer.name]
    for actor in part.actors:
        # It would change under a result that is read after the step, or under another state.
        if looks([key for _, key in (*actor.emits, *actor.writes)]):
            return False
        if looks((*actor.inputs, *actor.reads)):
            its_thread, its_time = last_firing[actor.name]
            # A message may still be on its way out when the actor that sent it has fired; and the
            # firings of other threads have no fixed time.
            if not isinstance(actor, Compute) or its_thread != thread or its_time > when:
                return False
    return True
