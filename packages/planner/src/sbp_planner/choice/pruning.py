"""What reduced costs leave of a problem: the strategies and pairs of costs up to some c.

bound + reduced cost of a pair  >  c        no assignment that costs at most c takes it
"""

from __future__ import annotations

from math import inf

import numpy as np

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.dual import ReducedCosts
from sbp_planner.choice.problem import Ints
from sbp_planner.choice.record import Mask


def room_for(guide: ReducedCosts, cost: float, few: int) -> tuple[float, float, int]:
    """Return the largest c that leaves few enough pairs.

    Args:
        guide: Reduced costs.
        cost: Of the best assignment known, which c is at most; `inf` if none is.
        few: Pairs that may be left.

    Returns:
        c, the reduced cost up to which strategies and pairs are left for it, and the pairs.
    """
    every = guide.pairs[guide.pairs < inf]
    room = cost - guide.bound
    if few < len(every):
        room = min(room, float(np.partition(every, few)[few]))
    below = min(guide.bound + room, cost)
    # Rounding may not forbid what costs just so much.
    room += 1e-9 * (abs(guide.bound) + abs(room)) if room < inf else 0.0
    return below, room, int((every <= room).sum())


def masks(
    compact: Compact, guide: ReducedCosts, room: float, values: Ints
) -> tuple[list[Mask], list[Mask]]:
    """Return which strategies of each node and pairs of each edge are left for some reduced cost.

    What the present assignment takes is left, too, so that the program has a solution.

    Args:
        compact: The problem.
        guide: Reduced costs.
        room: Up to which of them.
        values: The present assignment.
    """
    nodes, pairs = guide.nodes <= room, guide.pairs <= room
    nodes[compact.first[:-1] + values] = True
    pairs[compact.flat.chosen(values)] = True
    return (
        np.split(nodes, compact.first[1:-1]),
        [
            own.reshape(table.shape)
            for own, table in zip(
                np.split(pairs, compact.flat.first[1:-1]), compact.tables, strict=False
            )
        ],
    )
