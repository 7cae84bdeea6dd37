"""Cut compute segments, so that communication (boxing) begins as soon as its input is made.

before: backward.0.0   dy1 dw1 dy2 dw2 dy3 dw3           | all-reduce of dw1, of dw2, of dw3
after:  backward.0.0   dy1 dw1                           | all-reduce of dw1
        backward.0.0.1 dy2 dw2                           | all-reduce of dw2
        backward.0.0.2 dy3 dw3                           | all-reduce of dw3

Within a segment, inputs of boxing are computed in the order in which boxing needs them. So the
gradient of an activation, which other ranks wait for, goes before the gradients of weights. Updates
come in the order in which their gradients arrive, and are cut where another arrival begins. A piece
has to be worth its switch, so short pieces are left together. All decisions rest on data that are
equal on all ranks, so the pieces are equal, too.

Where boxing does not run in parallel with compute, cuts only save memory. There, segments that make
gradients are cut where a bucket of them is reduce-scattered, and new values of states are unpacked
bucket by bucket. So no rank holds all gradients whole, or the new values of all states twice:

before: backward.0.0   dw1 dw2 dw3   reduce-scatter 1 2 3     3 whole gradients are alive
after:  backward.0.0   dw1           reduce-scatter 1         1 whole gradient, shards of the rest
        backward.0.0.1 dw2           reduce-scatter 2
        backward.0.0.2 dw3           reduce-scatter 3
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from sbp_core.boxing import StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile.items import Item, ItemKind, LoweredItems
from sbp_core.compile.levels import is_awaited
from sbp_core.compile.program import LoweredProgram
from sbp_core.graph.ir import LogicalGraph, Phase, Rate
from sbp_core.strategy import Strategy

#: Items that pass a value on to boxing without computing.
_PASSING = (ItemKind.PACK, ItemKind.ACCUMULATE, ItemKind.LOCAL)

#: The departure of an item that no boxing needs.
_NEVER = 1 << 60


def cut(
    graph: LogicalGraph,
    strategy: Strategy,
    lowered: LoweredItems,
    piece_s: float,
    cluster: Cluster | None = None,
    *,
    overlaps: bool = True,
) -> LoweredItems:
    """Return the items with segments cut into pieces.

    Args:
        graph: The graph that was lowered.
        strategy: Its strategy.
        lowered: The items, with levels.
        piece_s: Least time of a piece, in seconds.
        cluster: The machine that determines the times of items; a nominal one if None.
        overlaps: Whether boxing runs in parallel with compute. Otherwise only makers of gradients
            that are scattered are cut, so that not all gradients are whole at once.
    """
    items = lowered.items
    exits = _exits(graph, items)
    # Before a gradient is scattered, a rank has an addend of all of it, and then a part; after a
    # state is gathered, it has the whole. The results of one such step go before the next step.
    scattered: set[int] = set()
    gathered: set[int] = set()
    for item in items:
        kind = item.step.kind if item.step is not None else None
        if kind is StepKind.REDUCE_SCATTER and not is_awaited(graph, item):
            scattered.add(exits[item.name])
        if kind is StepKind.ALL_GATHER and item.phase is Phase.OPTIMIZER and not item.asked_by:
            gathered.add(exits[item.name])
    piling = scattered if overlaps else scattered | gathered
    if not (exits if overlaps else scattered):
        return lowered
    program = LoweredProgram(graph, strategy, lowered, cluster)
    segments: dict[object, list[Item]] = defaultdict(list)
    for item in items:
        if item.is_inside:
            segments[item.segment].append(item)
    departures, arrivals = _departures(items, exits), _arrivals(items, exits)
    order: dict[str, Item] = {}
    pieces = dict(exits) if overlaps else {}  # ready boxing steps use this order too
    at_once: set[str] = set()
    for members in segments.values():
        first = members[0]
        unpacks = all(i.kind is ItemKind.UNPACK and arrivals[i.name] in piling for i in members)
        is_update = overlaps and first.phase is Phase.OPTIMIZER
        turns = arrivals if unpacks or is_update else departures
        if not overlaps and not unpacks:
            # Values that leave in other ways go with the next scattered one, and values that stay
            # with the last, so that a segment that makes only one stays whole.
            ends = sorted({departures[item.name] for item in members}.intersection(scattered))
            turns = {
                item.name: min(bisect_left(ends, departures[item.name]), len(ends) - 1)
                for item in members
            }
        # A maker never has a later turn than its users, and sorting keeps the order of equals: so
        # no use comes before its maker.
        ordered = sorted(members, key=lambda item: turns[item.name])
        # Packing alone takes no time, but lets boxing begin; unpacking alone frees buckets.
        is_packing = first.rate is not Rate.MICRO and not is_update
        least_s = 0.0 if is_packing or unpacks else piece_s
        weights = [program.time_s(item) for item in ordered]
        numbers = _pieces([turns[item.name] for item in ordered], weights, least_s)
        if overlaps or numbers[-1]:
            order |= dict(zip((item.name for item in members), ordered, strict=True))
        pieces |= dict(zip((item.name for item in ordered), numbers, strict=True))
        at_once.update(item.name for item in members if unpacks)
    makers = {key: item for item in items for key in item.outputs}
    behind: dict[str, tuple[int, int]] = {}
    for item in items:
        before = [makers[key] for key in item.inputs if key in makers]
        # Boxing and accumulations are not part of a segment, but they count with the piece that
        # makes their inputs.
        if before and (item.kind is ItemKind.ACCUMULATE or (item.leaves and not overlaps)):
            pieces[item.name] = pieces.get(before[0].name, 0)
        if before and exits.get(item.name) in piling:
            behind[item.name] = before[0].level, pieces.get(before[0].name, 0)
        elif before and (item.name in at_once or item.kind is ItemKind.ACCUMULATE):
            maker = before[0].name
            behind |= {item.name: behind[maker]} if maker in behind else {}
    placed = (order.get(item.name, item) for item in items)
    found = [
        replace(
            item,
            piece=pieces.get(item.name, 0),
            behind=None if item.leaves else behind.get(item.name),
        )
        for item in placed
    ]
    return replace(lowered, items=found)


def _exits(graph: LogicalGraph, items: Sequence[Item]) -> dict[str, int]:
    """Return the turn of each boxing item: first if others wait for it, then as inputs are made."""
    made: dict[str, int] = {}
    for place, item in enumerate(items):
        # An item that only passes a value on is ready when compute has made the value. Lowering
        # lists boxing where it is first needed, which may be long after.
        passes = item.leaves or item.kind in _PASSING
        when = max((made.get(key, 0) for key in item.inputs), default=0) if passes else place
        made |= dict.fromkeys(item.outputs, when)
    found = []
    for place, item in enumerate(items):
        if item.leaves:
            ready = max((made.get(key, 0) for key in item.inputs), default=0)
            # Of two ready steps, the one that the forward or backward phase needs goes first,
            # because other ranks wait for it.
            found.append((not is_awaited(graph, item), ready, place, item.name))
    return {name: turn for turn, (_, _, _, name) in enumerate(sorted(found))}


def _departures(items: Sequence[Item], exits: Mapping[str, int]) -> dict[str, int]:
    """Return the first boxing that needs an item, through its own segment; `_NEVER` if none."""
    users: dict[str, list[Item]] = defaultdict(list)
    found: dict[str, int] = {}
    # Backwards: among the uses of an item, the step that begins first.
    #
    #     dy --- dx --- send dx         turn 0     departures: dx 0, dw 1, dy min(0, 1) = 0
    #        \-- dw --- all-reduce dw   turn 1     order: dy dx | dw
    for item in reversed(items):
        turns = [_NEVER]
        for key in item.outputs:
            for user in users[key]:
                if user.leaves:
                    turns.append(exits[user.name])
                elif user.kind in _PASSING or user.segment == item.segment:
                    turns.append(found[user.name])
        found[item.name] = min(turns)
        for key in item.inputs:
            users[key].append(item)
    return found


def _arrivals(items: Sequence[Item], exits: Mapping[str, int]) -> dict[str, int]:
    """Return the last boxing that an item waits for, through its own segment; -1 if none.

    An item that only reads states, such as a decay, goes with its first user: otherwise it could
    run as the step begins, and its result would be held all along.
    """
    makers: dict[str, Item] = {}
    found: dict[str, int] = {}
    for item in items:
        turns = [-1]
        for maker in (makers[key] for key in item.inputs if key in makers):
            if maker.leaves:
                turns.append(exits[maker.name])
            elif maker.kind is ItemKind.UNPACK or maker.segment == item.segment:
                turns.append(found[maker.name])
        found[item.name] = max(turns)
        makers |= dict.fromkeys(item.outputs, item)
    users: dict[object, list[int]] = defaultdict(list)
    for item in reversed(items):
        turns = [turn for key in item.outputs for turn in users[(item.segment, key)]]
        if found[item.name] < 0 and turns:
            found[item.name] = min(turns)
        for key in item.inputs:
            users[(item.segment, key)].append(found[item.name])
    return found


def _pieces(turns: Sequence[int], weights_s: Sequence[float], piece_s: float) -> list[int]:
    """Return the number of each item's piece: pieces end where turns change.

    >>> _pieces([0, 0, 1, 2], [1.0, 1.0, 0.5, 3.0], 2.0)
    [0, 0, 1, 1]
    >>> _pieces([0, 0, 1, 2], [1.0, 1.0, 0.5, 1.0], 2.0)
    [0, 0, 0, 0]
    """
    runs = [len(list(run)) for _, run in groupby(turns)]
    ends = [0]
    for run in runs:
        ends.append(ends[-1] + run)
    left_s, numbers, number, own_s = sum(weights_s), [], 0, 0.0
    for start, end in pairwise(ends):
        numbers += [number] * (end - start)
        run_s = sum(weights_s[start:end])
        own_s, left_s = own_s + run_s, left_s - run_s
        # Both sides must be worth a switch, so the last piece is never a short rest.
        if own_s >= piece_s and left_s >= piece_s:
            number, own_s = number + 1, 0.0
    return numbers
