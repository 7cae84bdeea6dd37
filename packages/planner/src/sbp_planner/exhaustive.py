"""The planner `exhaustive`: every assignment of a small step, so the truth about others.

    minimise    serial time of a step: operators and boxing, by `sbp_core.infer.StepProblem`    [s]
    such that   the compiled plan fits the memory of a rank                                     [B]

Depth first over the storage of each input and the signature of each operator on all mesh axes, in
the order of the graph. A branch ends where what is decided, and the cheapest that each open
variable can be by itself, cost no less than the best so far. Where the plan of the cheapest does
not fit, a second search compiles all that it comes to, and ends branches by the best that fits.
Nothing else is pruned: this is what other
planners are tested against, on graphs of a few operators. The time grows with the product of the
numbers of options; `max_assignments` bounds how many are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sbp_core.errors import ConfigError, PlanError
from sbp_core.infer import FORBIDDEN_S, PinValue, StepProblem, joint_problem, strategy_of
from sbp_core.plugins import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.compiled import Compilation, Compiled
from sbp_planner.search_configs import ExhaustiveConfig

#: Sums in another order differ by less than this share.
_TIE = 1e-12


@dataclass(frozen=True, slots=True)
class ExhaustivePlanner:
    """Plans by looking at everything."""

    config: ExhaustiveConfig

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the cheapest strategy whose compiled plan fits.

        Raises:
            ConfigError: there are more assignments than `max_assignments`.
            PlanError: nothing fits, or nothing fulfils the pins.
        """
        quiet = replace(request, progress=None)
        pins: Mapping[str, PinValue] = self.config.pins
        problem = joint_problem(quiet, pins=pins)
        limit = self.config.memory_bytes or request.cluster.device.memory_bytes
        compilation = Compilation(request=quiet, limit_bytes=limit)
        search = _Search(problem, self.config.max_assignments)

        def compiled(values: tuple[int, ...]) -> Compiled:
            decision = problem.decided(values)
            return compilation.compiled(
                strategy_of(quiet, problem.work, decision, planner="exhaustive")
            )

        cheapest: tuple[float, tuple[int, ...]] | None = None
        for seconds, values in search.assignments():
            search.bound_s, cheapest = seconds, (seconds, values)
        if cheapest is None:
            raise PlanError("no assignment fulfils the pins", todo="remove a pin")
        first = compiled(cheapest[1])
        best = (cheapest[0], first) if first.fits else None
        least_bytes = first.memory_bytes
        if best is None:
            search.bound_s = FORBIDDEN_S
            for seconds, values in search.assignments():
                found = compiled(values)
                least_bytes = min(least_bytes, found.memory_bytes)
                if found.fits:
                    search.bound_s, best = seconds, (seconds, found)
        if best is None:
            raise PlanError(
                f"nothing fits the {format_bytes(limit)} of a rank: the least of "
                f"{compilation.num_compiled} plans needs {format_bytes(least_bytes)}",
                todo="raise the limit, or take more ranks or micro-batches",
            )
        seconds, chosen = best
        report = {
            "cost_s": seconds,
            "bound_s": seconds,
            "gap": 0.0,
            "num_looked_at": search.num_looked_at,
            "explanation": [
                f"exhaustive: the cheapest of all assignments that fit, "
                f"{format_seconds(seconds)} without overlap; {search.num_looked_at} branches"
            ],
        }
        return replace(chosen.strategy, report={**chosen.strategy.report, **report})


class _Search:
    """Depth first through the values of the variables of a step.

    Args:
        problem: The step.
        max_assignments: Branches that may be looked at.
    """

    def __init__(self, problem: StepProblem, max_assignments: int) -> None:
        self.problem, self.max_assignments = problem, max_assignments
        #: Only what costs less is yielded.
        self.bound_s = FORBIDDEN_S
        self.num_looked_at = 0
        # Storage first, as operators ask for what is stored, then the operators in order.
        order = [*problem.storage_variable.values(), *problem.node_variable.values()]
        self.order = list(dict.fromkeys(order))
        position = {variable: at for at, variable in enumerate(self.order)}
        self.ready: list[list[int]] = [[] for _ in self.order]
        for number, group in enumerate(problem.groups):
            members = [group.source, *group.others()]
            self.ready[max(position[one] for one in members)].append(number)
        least = [float(problem.unary[variable].min()) for variable in self.order]
        self.rest = [*np.cumsum(least[::-1])[::-1], 0.0]

    def assignments(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield (seconds, values) of assignments that cost less than `bound_s`.

        Raises:
            ConfigError: too many branches were looked at.
        """
        values = [0] * len(self.order)
        yield from self._from(0, 0.0, values)

    def _from(
        self, at: int, seconds: float, values: list[int]
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        if at == len(self.order):
            yield seconds, tuple(values)
            return
        variable = self.order[at]
        costs = self.problem.unary[variable]
        # The cheapest first, so that a good plan bounds the rest early.
        steps = []
        for value in range(len(costs)):
            values[variable] = value
            self.num_looked_at += 1
            steps.append((float(costs[value]) + self._conversions(at, values), value))
        if self.num_looked_at > self.max_assignments:
            raise ConfigError(
                f"more than {self.max_assignments} branches of {len(self.order)} operators and "
                f"states were looked at",
                where="planner.max_assignments",
                todo="choose planner=ilp, which proves the same without looking at all of them; "
                "or pin more, or take a smaller graph or mesh",
            )
        for step, value in sorted(steps):
            if seconds + step + self.rest[at + 1] < self.bound_s * (1 - _TIE):
                values[variable] = value
                yield from self._from(at + 1, seconds + step, values)

    def _conversions(self, at: int, values: list[int]) -> float:
        """Return what the boxing costs whose last variable is the one that was just decided."""
        return sum(self.problem.groups[number].cost(values) for number in self.ready[at])


def build(config: ExhaustiveConfig) -> ExhaustivePlanner:
    """Make the planner."""
    return ExhaustivePlanner(config)
