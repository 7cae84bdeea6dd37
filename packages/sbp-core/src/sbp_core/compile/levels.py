"""Number work items by the communication (boxing) steps before them: their levels.

`segments` makes one compute segment of the items of one stage, phase, rate and level: none of them
needs a result that was boxed after another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sbp_core.compile.items import Item, ItemKind
from sbp_core.graph.ir import InputKind, LogicalGraph, Phase
from sbp_core.graph.primitives import ACCUMULATE
from sbp_core.signatures.views import is_view, traits_of


def with_levels(graph: LogicalGraph, items: Iterable[Item]) -> list[Item]:
    """Return the items with their levels.

    The level counts the boxing steps and changes of stage on the longest path to an item.

    Args:
        graph: The graph that they were made from.
        items: The items, in topological order.
    """
    levels: dict[str, int] = {}
    made_on: dict[str, int] = {}
    front: dict[tuple[int, Phase], int] = {}
    found = []
    # Levels of x -> all-reduce -> y, where z needs no boxing:
    #
    #     level 0   x = mm(..)   z = relu(..)   all-reduce(x)       one segment: x, z
    #     level 1   y = add(x@(B), z)                               the next one
    for item in items:
        # Stages on the same ranks pass values on without a boxing step; that too ends a segment.
        level = max(
            (levels.get(k, 0) + (made_on.get(k, item.stage) != item.stage) for k in item.inputs),
            default=0,
        )
        if item.node is not None:
            place = (item.stage, item.phase)
            front[place] = max(level, front.get(place, 0))
        elif item.is_apart or (item.leaves and is_gathered_on_use(graph, item.inputs[0])):
            # No earlier than the segment before its user, so that copies do not pile up.
            level = max(level, front.get((item.stage, item.phase), 0))
        for key in item.outputs:
            levels[key] = level + item.leaves
            # A transfer has arrived on its stage; every rank has host numbers anyway.
            if not item.leaves and item.kind is not ItemKind.HOST:
                made_on[key] = item.stage
        found.append(replace(item, level=level))
    return sink(found)


def is_gathered_on_use(graph: LogicalGraph, value: str) -> bool:
    """Whether each phase boxes a value for itself, shortly before it uses it.

    True for parameters, and for parameters converted to another dtype: if the shards are converted
    before they are gathered, no phase keeps the whole tensor for another phase.
    """
    node = graph.producers.get(value)
    if node is not None and node.kind in traits_of(node.op).casts:
        value = node.args[0].name
    entry = graph.input_kinds.get(value)
    return entry is not None and entry.kind is InputKind.PARAMETER


def is_awaited(graph: LogicalGraph, item: Item) -> bool:
    """Whether the forward or backward phase uses the result of a boxing item.

    No phase before the optimizer waits for a gradient, even if it is accumulated until then.
    """
    asking = graph.by_name.get(item.asked_by)
    return asking is not None and asking.phase is not Phase.OPTIMIZER and asking.op != ACCUMULATE


def sink(items: Sequence[Item]) -> list[Item]:
    """Move items that gain nothing from being early into the segment that uses them first.

    Aliases and constants need no separate segment, and an update that begins before its gradient
    has come only holds memory.

    before: levels  t(w): 0  mul(w, decay): 0  mm(x@.., t(w)): 2  addcdiv(.., grad@..): 5
    after:  levels  t(w): 2  mul(w, decay): 5  mm(x@.., t(w)): 2  addcdiv(.., grad@..): 5
    """
    users: dict[str, list[Item]] = {}
    sunk: list[Item] = []
    # Backwards, so that users have moved before their arguments: a chain of views moves as a whole.
    for item in reversed(items):
        # It only views its argument, or needs none.
        light = (node := item.node) is not None and (
            is_view(node.op) or node.kind in traits_of(node.op).factories
        )
        if item.kind is ItemKind.OP and (light or item.phase is Phase.OPTIMIZER):
            found = [user for key in item.outputs for user in users.get(key, ())]
            # A later phase has separate segments, whose levels do not count here; and a value that
            # another stage takes must be ready a level before.
            same = [
                user.level - (user.stage != item.stage)
                for user in found
                if user.phase is item.phase
            ]
            item = replace(item, level=min(same, default=item.level))
        for key in item.inputs:
            users.setdefault(key, []).append(item)
        sunk.append(item)
    return sunk[::-1]
