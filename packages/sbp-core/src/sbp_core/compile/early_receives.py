"""Which receives a thread asks for ahead of their firings.

Transports move a message when its receiver has asked for it. So a thread asks for what it receives
next as soon as it has what it received last, and computes while that is on its way:

    the order of a thread      receive a0   F0   B0   receive a1   F1   B1
    asks for                 a0          a1                     a2

What it receives next is a run of receives with nothing between them, such as the tensors that cross
from one stage to the next. There is never more than one run that was asked for and has not come, so
this holds little memory, which `sbp_core.memory` counts. A receive that needs something of its own
rank is asked for when it fires. Orders know nothing of all this: to ask early only shortens a wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from sbp_core.compile.actors import Receive
from sbp_core.compile.physical import RankPlan


def early_receives(part: RankPlan, thread: str) -> Mapping[int, tuple[int, ...]]:
    """Return which receives are asked for before which firings of a thread, as places in its order.

    Args:
        part: Of the rank, with firing orders.
        thread: Of the rank.
    """
    found: dict[int, list[int]] = defaultdict(list)
    asks, in_run = 0, False
    for place, (name, _) in enumerate(part.orders[thread]):
        actor = part.by_name[name]
        if isinstance(actor, Receive):
            if not actor.inputs and not actor.reads:
                found[asks].append(place)
            in_run = True
        elif in_run:
            asks, in_run = place, False
    return {place: tuple(receives) for place, receives in found.items()}
