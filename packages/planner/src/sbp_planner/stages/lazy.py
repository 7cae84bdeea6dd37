"""Cut a model into pipeline stages, and price only the stages that may be in the best pipeline.

`stage_search` uses it, because there the price of a stage is the result of a slow search.

    start    every stage at a lower bound of its price, such as its work in equal parts
    repeat   the best pipeline at these prices (`table`)
             if all its stages are priced: nothing is better
             else price them, and begin again

No pipeline takes less than the best pipeline at lower bounds of the prices. So there is a bound at
any time. If the time is up, the best priced pipeline is returned with its distance to the bound.

Source: Dellin and Srinivasa, "A unifying formalism for shortest path problems with expensive edge
evaluations via lazy best-first search", ICAPS 2016 (lazy evaluation of a path's edges).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from sbp_planner.stages.table import (
    Floats,
    TablePlan,
    TableProblem,
    TableStage,
    cut_table,
    price_table,
)

#: Improvements below this relative amount are not looked for.
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStage:
    """The price of a stage, for one micro-batch.

    Args:
        free_s: Seconds, whatever memory it takes.
        held_s: Seconds within memory, with its micro-batches in flight; infinite if it is too much.
    """

    free_s: float
    held_s: float


#: (stage, devices after it, micro-batches in flight) -> its price.
Pricer = Callable[[TableStage, int, int], PricedStage]


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyPlan:
    """The best pipeline that was found.

    Args:
        plan: The pipeline.
        bound_s: No pipeline has a lower objective.
        num_priced: Number of stages that were priced.
    """

    plan: TablePlan
    bound_s: float
    num_priced: int


@dataclass(kw_only=True)
class _Prices:
    """The prices so far: exact where they are known, else the lower bounds of the problem."""

    least: TableProblem
    free: dict[tuple[int, int], Floats] = field(default_factory=dict)
    held: dict[tuple[int, int, int], Floats] = field(default_factory=dict)
    known: dict[tuple[TableStage, int, int], PricedStage] = field(default_factory=dict)

    def free_seconds(self, own: int, behind: int) -> Floats:
        """Return `TableProblem.seconds`."""
        if (own, behind) not in self.free:
            self.free[own, behind] = self.least.seconds(own, behind).copy()
        return self.free[own, behind]

    def held_seconds(self, own: int, behind: int, in_flight: int) -> Floats:
        """Return `TableProblem.held_seconds`: unknown stages take as long as without a limit."""
        key = own, behind, in_flight
        if key not in self.held:
            least = self.free_seconds(own, behind)
            if self.least.held_seconds is not None:
                least = np.maximum(least, self.least.held_seconds(*key))
            self.held[key] = least.copy()
        return self.held[key]

    def add(self, stage: TableStage, behind: int, in_flight: int, price: PricedStage) -> None:
        """Record the price of a stage."""
        place = stage.start, stage.stop
        self.known[stage, behind, in_flight] = price
        self.free_seconds(stage.devices, behind)[place] = price.free_s
        for (own, there, _), table in self.held.items():
            if (own, there) == (stage.devices, behind):
                table[place] = max(table[place], price.free_s)
        self.held_seconds(stage.devices, behind, in_flight)[place] = price.held_s


def cut_lazily(
    problem: TableProblem,
    price: Pricer,
    *,
    first: Sequence[Sequence[TableStage]] = (),
    is_out_of_time: Callable[[], bool] = lambda: False,
    gap: float = 0.0,
) -> LazyPlan | None:
    """Return the best pipeline; None if none was found that fits.

    Args:
        problem: Its `seconds`, and `held_seconds` if it has them, are lower bounds of the price.
        price: Called for stages that may be in the best pipeline, for each at most once.
        first: Pipelines that are priced before all others.
        is_out_of_time: Called between prices. Once it returns true, the best priced pipeline is
            taken. The first pipeline is always priced.
        gap: Relative distance to the bound at which the search ends, >= 0.
    """
    prices = _Prices(least=problem)
    asked = replace(
        problem, seconds=prices.free_seconds, held_seconds=prices.held_seconds, memory=None
    )
    best: TablePlan | None = None
    least = cut_table(asked)
    bound = 0.0 if least is None else least.objective_s
    todo = [list(stages) for stages in first]
    # The first pipeline is priced whole, so that there is a result.
    is_first = True
    while True:
        if todo:
            stages = todo.pop(0)
        else:
            plan = cut_table(asked)
            if plan is None:
                bound = inf
                break
            bound = max(bound, plan.objective_s)
            if best is not None and bound >= best.objective_s * (1 - max(gap, _TOLERANCE)):
                break
            stages = list(plan.stages)
        takes: list[float] = []
        for stage, behind, count in problem.walk(stages):
            key = stage, behind, problem.held(stage.devices, behind, count)
            if key not in prices.known:
                if not is_first and is_out_of_time():
                    takes.append(inf)
                    break
                prices.add(*key, price(*key))
        is_first = False
        takes += [
            float(asked.times(stage.devices, behind, count)[stage.start, stage.stop])
            for stage, behind, count in problem.walk(stages)
        ]
        if max(takes) < inf:
            found = price_table(asked, stages)
            if best is None or found.objective_s < best.objective_s:
                best = found
        if is_out_of_time():
            break
    if best is None:
        return None
    return LazyPlan(plan=best, bound_s=min(bound, best.objective_s), num_priced=len(prices.known))
