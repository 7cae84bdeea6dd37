"""Choose replicated or sharded for each parameter, such that a step is fastest and fits (OSDP).

    minimise    sum_i t_i(o_i)                           o_i one of the options of item i    [s]
    such that   sum_i m_i(o_i) + F + max_i x_i(o_i) <= L                                     [B]

t, m and x are the seconds, the resident bytes and the transient bytes of an option; F does not
depend on the choice; L is the limit. An item may be a parameter with the options replicated and
sharded, or a block of which several parts may be sharded. This module knows no graph and no
cluster.

The solution is exact; bytes are never rounded. The transient is a maximum, so the problem is solved
for each value τ that it may have. Under options with x <= τ it is a knapsack of capacity L - F - τ,
which `sbp_planner.choice.solve_chain` solves.

Source: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI
2023, section 3 (the model; the search there is depth-first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_planner.choice import solve_chain


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class KnapsackOption:
    """One option of an item.

    Args:
        transient_bytes: Bytes held in addition while the item is used.
        resident_bytes: Bytes held all the time.
        seconds: Its share of the time of a step.
    """

    transient_bytes: int = 0
    resident_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if min(self.transient_bytes, self.resident_bytes, self.seconds) < 0:
            raise SbpValueError(f"{self} is negative", accepted="bytes and seconds >= 0")


#: The options of one item; at least one.
Options: TypeAlias = Sequence[KnapsackOption]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnapsackSolution:
    """A choice and its cost.

    Args:
        chosen: For each item, the index of its option.
        seconds: Sum of the options' times.
        memory_bytes: Sum of F, the resident bytes, and the largest transient.
    """

    chosen: tuple[int, ...]
    seconds: float
    memory_bytes: int


def evaluate(
    items: Sequence[Options], chosen: Sequence[int], fixed_bytes: int = 0
) -> KnapsackSolution:
    """Return time and memory of a choice."""
    taken = [options[index] for options, index in zip(items, chosen, strict=True)]
    resident = sum(option.resident_bytes for option in taken)
    transient = max((option.transient_bytes for option in taken), default=0)
    return KnapsackSolution(
        chosen=tuple(chosen),
        seconds=sum(option.seconds for option in taken),
        memory_bytes=fixed_bytes + resident + transient,
    )


def choose(
    items: Sequence[Options], limit_bytes: float, fixed_bytes: int = 0
) -> KnapsackSolution | None:
    """Return the fastest choice that fits; of equally fast choices the one with the least memory.

    Args:
        items: The options of each item.
        limit_bytes: The limit L.
        fixed_bytes: The constant F.

    Returns:
        The choice; None if nothing fits.
    """
    # Equal items next to each other keep the frontier small, because their sums coincide.
    order = sorted(range(len(items)), key=lambda index: (tuple(items[index]), index))
    usages = [np.array([o.resident_bytes for o in items[index]]) for index in order]
    best: KnapsackSolution | None = None
    for most in sorted({o.transient_bytes for options in items for o in options} or {0}):
        costs = [
            np.array([o.seconds if o.transient_bytes <= most else inf for o in items[index]])
            for index in order
        ]
        found = solve_chain(costs, usages, None, limit_bytes - fixed_bytes - most)
        if found is not None:
            taken = dict(zip(order, found.assignment, strict=True))
            solution = evaluate(items, [taken[index] for index in range(len(items))], fixed_bytes)
            if best is None or (solution.seconds, solution.memory_bytes) < (
                best.seconds,
                best.memory_bytes,
            ):
                best = solution
    return best
