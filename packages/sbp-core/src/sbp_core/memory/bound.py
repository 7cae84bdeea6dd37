"""A cheap upper bound of the memory of a plan, from the shapes of the logical graph alone.

The exact prediction has to ask the tensor library for the memory layout of the result of every
call. Planners skip it if the sum of everything that a step makes fits into the memory.
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
from sbp_core.graph.primitives import STACK

#: Most bytes of an element.
_WIDEST_BYTES = max(ITEMSIZE.values())


def memory_bound(plan: PhysicalPlan, graph: LogicalGraph) -> float:
    """Return an upper bound of the memory of every rank, in bytes, as `predict_memory` counts it.

    It counts everything that a step makes, as though nothing were freed, shared or split. The made
    values count twice: new states of the previous step may keep larger buffers.

    Args:
        plan: The plan, as for `predict_memory`.
        graph: The graph from which it was compiled.
    """
    bound = _Bound(plan, graph)
    return max(bound.of(part) for part in plan.distinct)


def offloaded_bytes(plan: PhysicalPlan) -> int:
    """Return an upper bound of the host memory of every rank, in bytes: old and new states.

    New values that are written over the old ones take no more.
    """
    found = [0]
    for part in plan.distinct:
        over = {state for actor in part.actors for state in actor.in_place}
        slots = [slot for slot in part.slots if slot.offloaded]
        found.append(sum(s.local_bytes * (1 if s.name in over else 2) for s in slots))
    return max(found)


class _Bound:
    """The sum of the bytes that a rank makes."""

    def __init__(self, plan: PhysicalPlan, graph: LogicalGraph) -> None:
        self.plan, self.graph = plan, graph
        #: Bytes of keys that are not values of the graph: first the results of boxing packs.
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
        """Return the bytes that one firing makes."""
        if isinstance(actor, Compute):
            return sum(map(self._call_bytes, actor.instructions))
        if isinstance(actor, Collective | Receive):
            return self._boxed_bytes(actor)
        if isinstance(actor, Accumulate):
            # A stack is copied, with one more part, by each firing.
            made = ((total if how == STACK else part) for part, total, how in actor.accumulates)
            return sum(map(self._key_bytes, made))
        return 0  # a send keeps the result of another actor

    def _call_bytes(self, entry: Instruction) -> float:
        """Return the bytes that a call makes; values of the graph count as whole tensors."""
        total = 0.0
        for key in entry.outputs:
            if key.partition("@")[0] not in self.graph.types:
                self._inner_bytes[key] = self._inner_call_bytes(entry)
            total += self._key_bytes(key)
        return total

    def _inner_call_bytes(self, entry: Instruction) -> float:
        """Return the most bytes of a result that is not a value of the graph."""
        node = self.graph.by_name.get(entry.node)
        if node is not None:  # a step of a localised operator, such as a mask
            types = (self.graph.types[value] for value in (*node.inputs(), *node.outputs))
            sizes = (prod(kind.shape) for kind in types if isinstance(kind, TensorType))
            return max(sizes, default=1) * _WIDEST_BYTES
        keys = keys_in(entry)  # a pack or an unpacked part is not larger than the arguments
        return sum(map(self._key_bytes, keys)) if keys else _WIDEST_BYTES

    def _key_bytes(self, key: str) -> float:
        """Return the most bytes of a key, in any boxed form: `x@1(B)` is an `x`."""
        if key in self._inner_bytes:
            return self._inner_bytes[key]
        kind = self.graph.types.get(key.partition("@")[0])
        if kind is None:
            return inf  # made by a later actor
        return kind.size_bytes if isinstance(kind, TensorType) else _WIDEST_BYTES

    def _boxed_bytes(self, actor: Collective | Receive) -> int:
        """Return the bytes of the whole tensor that a boxing step moves."""
        step = self.plan.steps[actor.step]
        return prod(step.shape) * ITEMSIZE[step.dtype]
