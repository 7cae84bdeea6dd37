"""The purposes (kinds) of a rank's memory, and the kind of each key (value on a rank) of a plan.

| kind | content |
|---|---|
| parameters, states, buffers | of the model and its optimizer, old and new values |
| batch | the rank's parts of all micro-batches |
| gradients | results of the backward phase for the optimizer, also boxed and summed |
| gathered | parameters, boxed for their use |
| fetched | offloaded states on the device, old and new values |
| activations | all other values that live from one firing to another |
| communication buffers | buffers that processes pack and receive for messages |
| temporaries | values that live inside one firing |

`storages` uses it; reports group the memory of a rank by these kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from sbp_core.compile.actors import Accumulate, BoxingActor, Collective, Compute, Receive, keys_in
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.graph.ir import InputKind, Phase
from sbp_core.graph.primitives import TO_DEVICE, TO_HOST, TO_HOST_IN_PLACE
from sbp_core.signatures.views import is_view, traits_of


class MemoryKind(StrEnum):
    """The purpose of memory: parameters, states, activations and so on."""

    PARAMETERS = "parameters"
    STATES = "states"
    BUFFERS = "buffers"
    BATCH = "batch"
    GRADIENTS = "gradients"
    GATHERED = "gathered"
    FETCHED = "fetched"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication buffers"
    TEMPORARIES = "temporaries"


_OF_INPUT: Mapping[InputKind, MemoryKind] = {
    InputKind.PARAMETER: MemoryKind.PARAMETERS,
    InputKind.BUFFER: MemoryKind.BUFFERS,
    InputKind.OPTIMIZER_STATE: MemoryKind.STATES,
}


def _is_same(op: str) -> bool:
    """Whether an operator's result is its argument: a view, a cast or a concatenation."""
    kind, traits = op.split(".")[1], traits_of(op)
    return is_view(op) or kind in traits.copies or kind in traits.joins


def kind_of_slot(kind: str) -> MemoryKind:
    """Return the kind of a graph input, by its `InputKind` value."""
    return _OF_INPUT.get(InputKind(kind), MemoryKind.BATCH)


def module_of_slot(name: str, kind: str) -> str:
    """Return the module that a state belongs to: `h.0.mlp` of `h.0.mlp.weight.exp_avg`."""
    if kind == InputKind.BATCH:
        return ""
    cuts = 2 if kind == InputKind.OPTIMIZER_STATE else 1
    parts = name.rsplit(".", cuts)
    return parts[0] if len(parts) > 1 else ""


def module_of_node(name: str) -> str:
    """Return the module of a node: `h.0` of `h.0.mm`, `h.0.grad.mm`, `h.0.weight.update.mul`."""
    path = name.rsplit(".", 1)[0] if "." in name else ""
    if path.endswith(".update"):
        return module_of_node(path.removesuffix(".update"))
    return path.removesuffix(".grad")


def kinds_of_keys(plan: PhysicalPlan, part: RankPlan) -> dict[str, MemoryKind]:
    """Return the kinds of those keys of a rank whose kind does not depend on their lifetime."""
    kinds = dict.fromkeys(_gathered(plan, part), MemoryKind.GATHERED)
    kinds |= dict.fromkeys(_gradients(part), MemoryKind.GRADIENTS)
    # Values that are copied from the host, and to the host.
    for actor in part.actors:
        for entry in actor.instructions if isinstance(actor, Compute) else ():
            if entry.op == TO_DEVICE:
                kinds |= dict.fromkeys(entry.outputs, MemoryKind.FETCHED)
            elif entry.op in (TO_HOST, TO_HOST_IN_PLACE):
                kinds |= dict.fromkeys(keys_in(entry)[1:], MemoryKind.FETCHED)
    slots = {slot.name: slot.kind for slot in part.slots}
    for actor in part.actors:
        for state, key in actor.writes:
            kinds[key] = kind_of_slot(slots[state])
    return kinds


def _gathered(plan: PhysicalPlan, part: RankPlan) -> set[str]:
    """Return the keys that are parameters, cast or boxed, next to the parameters themselves.

    A parameter may come from another stage, so that this rank has no slot of it.
    """
    own = {
        slot.name for rank in plan.ranks for slot in rank.slots if slot.kind == InputKind.PARAMETER
    }
    boxed: set[str] = set()
    # In the order of their first firings, thread by thread.
    for name in dict.fromkeys(name for order in part.orders.values() for name, _ in order):
        actor = part.by_name[name]
        if isinstance(actor, Collective | Receive):
            source = {*actor.inputs, *actor.reads}
            if source & own or (not source and actor.makes.split("@", 1)[0] in own):
                boxed.add(actor.makes)
                own.add(actor.makes)
        for entry in actor.instructions if isinstance(actor, Compute) else ():
            sources = set(keys_in(entry))
            if _is_same(entry.op) and sources and sources <= own:
                own.update(entry.outputs)
                boxed.update(entry.outputs if sources <= boxed else ())
    return boxed


def _gradients(part: RankPlan) -> set[str]:
    """Return the keys that the optimizer takes from the backward phase, and their unboxed keys."""
    makers = {key: actor for actor in part.actors for key in actor.outputs}
    todo = [key for actor in part.actors if actor.phase is Phase.OPTIMIZER for key in actor.inputs]
    found: set[str] = set()
    while todo:
        key = todo.pop()
        maker = makers.get(key)
        if key in found or maker is None or maker.phase is Phase.FORWARD:
            continue
        if maker.phase is Phase.OPTIMIZER and not isinstance(maker, BoxingActor):
            continue
        found.add(key)
        if isinstance(maker, BoxingActor):
            todo.extend(maker.inputs)
        elif isinstance(maker, Compute):
            todo.extend(_cast_from(maker, key))
        elif isinstance(maker, Accumulate):
            todo.extend(source for source, total, _ in maker.accumulates if total == key)
    return found


def _cast_from(actor: Compute, key: str) -> set[str]:
    """Return the inputs of a segment from which a key is made only by views, casts or buckets."""
    makers = {out: entry for entry in actor.instructions for out in entry.outputs}
    todo, found = [key], set()
    while todo:
        entry = makers.get(one := todo.pop())
        if entry is None:
            found.add(one)
        elif _is_same(entry.op):
            todo.extend(keys_in(entry))
    return found & set(actor.inputs)
