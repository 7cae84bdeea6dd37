"""A bound of the memory of a plan, from the shapes of the logical graph alone.

The exact memory asks the tensor library how the result of every call lies. Where even all that a
step ever makes fits, nobody has to know.
"""

from __future__ import annotations

from math import inf, prod

from sbp_core.compile.actors import (
    Accumulate,
    Actor,
    Collective,
    Compute,
    Instruction,
    Receive,
    keys_in,
)
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.graph.ir import ITEMSIZE, InputKind, LogicalGraph, TensorType

#: Most bytes of an element.
_WIDEST_BYTES = max(ITEMSIZE.values())


def memory_bound(plan: PhysicalPlan, graph: LogicalGraph) -> float:
    """Return bytes that the memory of no rank exceeds, as `predict_memory` counts it.

    All that a step makes is counted as though nothing were dropped, shared or split; and once more
    for the step before, of which new states may keep buffers that are larger than they are.

    Args:
        plan: As `predict_memory` takes it.
        graph: What it was compiled from.
    """
    bound = _Bound(plan, graph)
    return max(bound.of(part) for part in plan.distinct)


def offloaded_bytes(plan: PhysicalPlan) -> int:
    """Return bytes that no rank exceeds in the memory of its host: old and new states.

    New values that are written over the old ones take no more.
    """
    found = [0]
    for part in plan.distinct:
        over = {state for actor in part.actors for state in actor.in_place}
        slots = [slot for slot in part.slots if slot.offloaded]
        found.append(sum(s.local_bytes * (1 if s.name in over else 2) for s in slots))
    return max(found)


class _Bound:
    """Adds up what ranks make."""

    def __init__(self, plan: PhysicalPlan, graph: LogicalGraph) -> None:
        self.plan, self.graph = plan, graph
        #: Bytes of keys that stand for no value of the graph: first what boxing makes of packs.
        self._inner_bytes: dict[str, float] = {
            actor.makes: self._boxed_bytes(actor)
            for part in plan.distinct
            for actor in part.actors
            if isinstance(actor, Collective | Receive)
        }

    def of(self, part: RankPlan) -> float:
        """Return the bound of a rank, in bytes."""
        count = self.plan.num_micro_batches
        held = sum(
            slot.local_bytes * (1 if InputKind(slot.kind).is_state else count)
            for slot in part.slots
        )
        made = sum(
            actor.num_firings(self.plan.repetitions) * self._made_bytes(actor)
            for actor in part.actors
        )
        return held + 2 * made

    def _made_bytes(self, actor: Actor) -> float:
        """Return what one firing makes."""
        if isinstance(actor, Compute):
            return sum(map(self._call_bytes, actor.instructions))
        if isinstance(actor, Collective | Receive):
            return self._boxed_bytes(actor)
        if isinstance(actor, Accumulate):
            return sum(self._key_bytes(part) for part, _, _ in actor.accumulates)
        return 0  # a send keeps what others made

    def _call_bytes(self, entry: Instruction) -> float:
        """Return what a call makes: whole logical tensors where it computes those of the graph."""
        total = 0.0
        for key in entry.outputs:
            if key.partition("@")[0] not in self.graph.types:
                self._inner_bytes[key] = self._inner_call_bytes(entry)
            total += self._key_bytes(key)
        return total

    def _inner_call_bytes(self, entry: Instruction) -> float:
        """Return the most that a result takes which is none of the graph."""
        node = self.graph.by_name.get(entry.node)
        if node is not None:  # a step of a localised operator, such as a mask
            types = (self.graph.types[value] for value in (*node.inputs(), *node.outputs))
            sizes = (prod(kind.shape) for kind in types if isinstance(kind, TensorType))
            return max(sizes, default=1) * _WIDEST_BYTES
        keys = keys_in(entry)  # what packs and unpacks is not larger than what it is given
        return sum(map(self._key_bytes, keys)) if keys else _WIDEST_BYTES

    def _key_bytes(self, key: str) -> float:
        """Return the most that a key takes, in whatever form it is boxed: `x@1(B)` is an `x`."""
        if key in self._inner_bytes:
            return self._inner_bytes[key]
        kind = self.graph.types.get(key.partition("@")[0])
        if kind is None:
            return inf  # of an actor that comes later
        return kind.size_bytes if isinstance(kind, TensorType) else _WIDEST_BYTES

    def _boxed_bytes(self, actor: Collective | Receive) -> int:
        """Return the bytes of the whole tensor that a boxing step moves."""
        step = self.plan.steps[actor.step]
        return prod(step.shape) * ITEMSIZE[step.dtype]
