"""Cut segments, so that boxing overlaps with compute: begun as soon as its input is made.

before: backward.0.0   dy1 dw1 dy2 dw2 dy3 dw3           | all-reduce of dw1, of dw2, of dw3
after:  backward.0.0   dy1 dw1                           | all-reduce of dw1
        backward.0.0.1 dy2 dw2                           | all-reduce of dw2
        backward.0.0.2 dy3 dw3                           | all-reduce of dw3

What boxing needs first comes first within a segment; so the gradient of an activation, which other
ranks wait for, goes before those of weights. Updates come in the order in which their gradients
arrive, and are cut where another arrival begins. A piece is worth its switch: short ones are left
together. Works on what is the same for all ranks, so their pieces are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from sbp_core.cluster import Cluster
from sbp_core.compile.items import Item, ItemKind, Lowered
from sbp_core.compile.program import Program
from sbp_core.graph.ir import LogicalGraph, Phase, Rate
from sbp_core.strategy import Strategy

#: What hands a value on to boxing without computing.
_PASSING = (ItemKind.PACK, ItemKind.ACCUMULATE, ItemKind.LOCAL)

#: The departure of what no boxing needs.
_NEVER = 1 << 60


def cut(
    graph: LogicalGraph,
    strategy: Strategy,
    lowered: Lowered,
    piece_s: float,
    cluster: Cluster | None = None,
) -> Lowered:
    """Return the items with segments cut into pieces.

    Args:
        graph: What was lowered.
        strategy: How.
        lowered: With levels.
        piece_s: Least time of a piece, in seconds.
        cluster: The machine that says how long items take; a nominal one if None.
    """
    items = lowered.items
    exits = _exits(graph, items)
    if not exits:
        return lowered
    program = Program(graph, strategy, lowered, cluster)
    segments: dict[object, list[Item]] = defaultdict(list)
    for item in items:
        if item.is_inside:
            segments[item.segment].append(item)
    departures, arrivals = _departures(items, exits), _arrivals(items, exits)
    order: dict[str, Item] = {}
    pieces = dict(exits)  # boxing that could begin goes in this order too
    for members in segments.values():
        first = members[0]
        turns = arrivals if first.phase is Phase.OPTIMIZER else departures
        # What makes a value never has a later turn than what uses it, and sorting keeps the order
        # of equals: so no use comes before what it uses.
        ordered = sorted(members, key=lambda item: turns[item.name])
        # Packing alone takes no time, but lets boxing begin.
        is_packing = first.rate is not Rate.MICRO and first.phase is not Phase.OPTIMIZER
        weights = [program.time_s(item) for item in ordered]
        numbers = _pieces([turns[i.name] for i in ordered], weights, 0.0 if is_packing else piece_s)
        order |= dict(zip((item.name for item in members), ordered, strict=True))
        pieces |= dict(zip((item.name for item in ordered), numbers, strict=True))
    makers = {key: item for item in items for key in item.outputs}
    for item in items:
        # An accumulation is no part of a segment, but counts with the piece that makes its addend.
        if item.kind is ItemKind.ACCUMULATE and item.inputs[0] in makers:
            pieces[item.name] = pieces.get(makers[item.inputs[0]].name, 0)
    placed = (order.get(item.name, item) for item in items)
    return Lowered(
        items=[replace(item, piece=pieces.get(item.name, 0)) for item in placed],
        held=lowered.held,
        results=lowered.results,
        new_states=lowered.new_states,
    )


def _exits(graph: LogicalGraph, items: Sequence[Item]) -> dict[str, int]:
    """Return the turn of each boxing item: what others wait for first, then as inputs are made."""
    made: dict[str, int] = {}
    for place, item in enumerate(items):
        # What only hands a value on is ready when the value is: where compute made it counts, as
        # lowering lists boxing where it is first asked for, which may be long after.
        passes = item.leaves or item.kind in _PASSING
        when = max((made.get(key, 0) for key in item.inputs), default=0) if passes else place
        made |= dict.fromkeys(item.outputs, when)
    found = []
    for place, item in enumerate(items):
        if item.leaves:
            asking = graph.by_name.get(item.asked_by)
            # Of two steps that could begin, other ranks wait for the one that the forward or
            # backward phase asks for.
            is_late = asking is None or asking.phase is Phase.OPTIMIZER
            ready = max((made.get(key, 0) for key in item.inputs), default=0)
            found.append((is_late, ready, place, item.name))
    return {name: turn for turn, (_, _, _, name) in enumerate(sorted(found))}


def _departures(items: Sequence[Item], exits: Mapping[str, int]) -> dict[str, int]:
    """Return the first boxing that needs an item, through its own segment; `_NEVER` if none."""
    users: dict[str, list[Item]] = defaultdict(list)
    found: dict[str, int] = {}
    # Backwards: of what an item is used for, the step that begins first.
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

    What only reads states, such as a decay, goes with who uses it first: else it could be done as
    the step begins, and would be held all along.
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
