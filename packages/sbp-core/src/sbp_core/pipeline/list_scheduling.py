"""Orders by list scheduling: whoever is free does what is most urgent of what can be done.

Source: Graham, Bounds on Multiprocessing Timing Anomalies (1969); for pipelines the greedy search
of Zero Bubble (arXiv 2401.10241) §3.1.

Stability: internal.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from sbp_core.pipeline.precedence import Precedence


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What is more urgent where several actions can be done.

    Args:
        limits: For each rank the most activations of chunks alive.
        forward_first: Whether a forward comes before the gradient of an input.
        depth_first: Whether of two forwards that of the later stage comes first.
        patient: Whether a weight gradient waits for what is on its way and would be delayed by it.
    """

    limits: tuple[int, ...]
    forward_first: bool
    depth_first: bool
    patient: bool


def list_schedule(work: Precedence, preference: Preference) -> list[list[int]] | None:
    """Return for each rank the order of its actions; `None` if the limits let nothing go on."""
    m, num_ranks = work.num_micro_batches, len(work.placement)
    chunk_of = {stage: chunk for held in work.placement for chunk, stage in enumerate(held)}
    after: list[list[tuple[int, int]]] = [[] for _ in work.before]
    missing = [len(before) for before in work.before]
    for number, before in enumerate(work.before):
        for other, lag in before:
            after[other].append((number, lag))

    def urgency(number: int) -> tuple[int, int, int]:
        stage, part = divmod(number // m, 3)
        if part == 0:
            deep = -stage if preference.depth_first else stage
            return (0 if preference.forward_first else 2, deep, number % m)
        return (1 if part == 1 else 3, number % m, stage)

    arrives: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for stage in range(work.num_stages):
        if stage == 0:
            arrives[work.rank_of[0]] += [(0, k) for k in range(m)]
    ready: list[list[tuple[tuple[int, int, int], int]]] = [[] for _ in range(num_ranks)]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    alive, reached = [0] * num_ranks, [0] * len(work.before)
    clock = [(0, rank) for rank in range(num_ranks)]
    busy_until = [0] * num_ranks
    while clock:
        now, rank = heappop(clock)
        if now < busy_until[rank]:
            continue
        while arrives[rank] and arrives[rank][0][0] <= now:
            number = heappop(arrives[rank])[1]
            heappush(ready[rank], (urgency(number), number))
        held = len(work.placement[rank])
        chosen = None
        for entry in sorted(ready[rank]):
            stage, part = divmod(entry[1] // m, 3)
            spare = held - 1 - chunk_of[stage]
            if part == 0 and alive[rank] >= preference.limits[rank] - spare:
                continue
            if part == 2 and preference.patient and arrives[rank]:
                soon, coming = arrives[rank][0]
                takes = work.duration[entry[1]]
                urgent = coming // m % 3 == 1 or alive[rank] < preference.limits[rank]
                if urgent and soon < now + takes and 2 * (soon - now) < takes:
                    continue
            chosen = entry
            break
        if chosen is None:
            if arrives[rank]:
                heappush(clock, (max(now, arrives[rank][0][0]), rank))
            continue
        ready[rank].remove(chosen)
        ready[rank].sort()
        number = chosen[1]
        part = number // m % 3
        alive[rank] += (part == 0) - (part == 2)
        end = busy_until[rank] = now + work.duration[number]
        orders[rank].append(number)
        for other, lag in after[number]:
            missing[other] -= 1
            reached[other] = max(reached[other], end + lag)
            if not missing[other]:
                heappush(arrives[work.rank[other]], (reached[other], other))
                heappush(
                    clock, (max(reached[other], busy_until[work.rank[other]]), work.rank[other])
                )
        heappush(clock, (end, rank))
    done = sum(map(len, orders)) == len(work.before)
    return orders if done else None
