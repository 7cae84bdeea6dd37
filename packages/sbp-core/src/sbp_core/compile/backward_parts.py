"""Split the backward phase: input gradients, which other stages wait for, and weight gradients.

before: backward.0.0            dy2 = relu'(dy), dw2 = x^T dy2, dx = dy2 w^T, dy1 = ..., dw1 = ...
after:  backward.0.0            dy2, dx, dy1
        weight_gradient.0.0     dw2, dw1

An item of the backward phase makes weight gradients if each of its outputs affects exactly one of
the gradients that the optimizer takes, and nothing else: no other stage, and not the gradients of
two parameters, as gradients of activations do. The two parts then fire separately, so a schedule
can fill bubbles with weight gradients. Work that the graph has in one op is not split here: see
`sbp_aten.passes.backward_split`.

Source: Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from sbp_core.compile.items import Item, ItemKind, LoweredItems
from sbp_core.graph.ir import Phase, Rate

#: Stands for several gradients, or for another stage.
_MANY = ""


def split_backward(lowered: LoweredItems, stages: Collection[int] | None = None) -> LoweredItems:
    """Return the items with the makers of weight gradients in a separate phase.

    Args:
        lowered: The items, with levels.
        stages: The stages whose backward is split; all if None.
    """
    makers = _makers(lowered.items)

    def is_apart(item: Item) -> bool:
        return item.name in makers and (stages is None or item.stage in stages)

    items = [
        replace(item, phase=Phase.WEIGHT_GRADIENT) if is_apart(item) else item
        for item in lowered.items
    ]
    return replace(lowered, items=items)


def waited_for(lowered: LoweredItems) -> frozenset[int]:
    """Return the stages whose input gradients, of a micro-batch, another stage waits for.

    If their weight gradients w fire after the send of their input gradients b, the other stage
    begins its backward B earlier, whatever the schedule:

        before  rank 0  F F . . B B . B B      after  rank 0  F F . B B . B B
                rank 1  . F b w F b w . .             rank 1  . F b w F b w .
    """
    return frozenset(
        item.stage
        for item in lowered.items
        if item.kind is ItemKind.TRANSFER and _is_backward(item)
    )


def _is_backward(item: Item) -> bool:
    return item.phase is Phase.BACKWARD and item.rate is Rate.MICRO


def _makers(items: Sequence[Item]) -> frozenset[str]:
    """Return the names of the backward items that make only weight gradients."""
    many = frozenset((_MANY,))
    users: dict[str, list[Item]] = defaultdict(list)
    # For each backward item, the gradients that depend on it: none, one, or `_MANY`.
    reached: dict[str, frozenset[str]] = {}
    makers: set[str] = set()

    def reached_from(item: Item, key: str) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for user in users[key]:
            if user.stage != item.stage or user.kind is ItemKind.TRANSFER:
                found |= many
            elif _is_backward(user):
                # A value that leaves the phase without a gradient, such as a metric, is not moved.
                found |= reached[user.name] or many
            else:
                found |= frozenset((key,))
        return found

    for item in reversed(items):
        # A sum over micro-batches ends the phase, and so does the optimizer if there is only one.
        if item.kind is ItemKind.ACCUMULATE:
            outputs = [frozenset((key,)) for key in item.outputs]
        else:
            outputs = [reached_from(item, key) for key in item.outputs]
        found = frozenset().union(*outputs)
        # An operator may make the gradients of weights and bias at once.
        is_maker = bool(found) and _MANY not in found and all(len(one) <= 1 for one in outputs)
        if is_maker and _is_backward(item):
            makers.add(item.name)
        reached[item.name] = found if len(found) <= 1 else many
        for key in item.inputs:
            users[key].append(item)
    return frozenset(makers)
