"""The planner `exhaustive`: looks at every assignment of a small step, to test other planners.

    minimise    serial time of a step: operators and boxing, by `sbp_core.infer.StepProblem`    [s]
    such that   the compiled plan fits the memory of a rank                                     [B]

It goes depth first over the storage of each input and the signature of each operator on all mesh
axes, in the order of the graph. A branch ends where its lower bound is no less than the best so
far: the cost of what is decided, plus the least cost of each open variable by itself. If the plan
of the cheapest assignment does not fit, a second search compiles every assignment that it reaches,
and ends branches by the best plan that fits. Variants of the step that are left open are searched
in turn, each for what costs less than the best so far. Offloaded states are chosen as in all
planners (`offload_search`); for a given choice of them the search is exact. Nothing else is pruned,
because other planners are tested against this one, on graphs of a few operators. The time grows
with the product of the numbers of options; `max_assignments` limits the assignments of a variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, log10

import numpy as np

from sbp_core.errors import ConfigError, MemoryLimitError, PlanError, SbpError, SignatureError
from sbp_core.graph_variant import GraphVariant
from sbp_core.infer import FORBIDDEN_S, PinValue, StepProblem, joint_problem, strategy_of
from sbp_core.planning import (
    Compilation,
    Compiled,
    PlanContext,
    PlanRequest,
    SearchedPlanner,
    requests_of,
    variant_words,
    variants_of,
)
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.search_configs import ExhaustiveConfig

#: Sums in another order differ by less than this relative amount.
_TIE = 1e-12

#: Progress is reported after this many branches.
_TELL = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The cheapest plan of one variant of the step that fits; see `_Variant.run`."""

    variant: GraphVariant | None
    seconds: float
    compiled: Compiled


@dataclass(frozen=True, slots=True)
class ExhaustivePlanner(SearchedPlanner):
    """Plans by looking at all assignments."""

    config: ExhaustiveConfig

    chooses_variants = keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the cheapest strategy whose compiled plan fits, of all variants of the step.

        Raises:
            ConfigError: there are more assignments than `max_assignments`.
            PlanError: nothing fits, or the pins cannot be satisfied.
        """
        request, limit = context.request, context.limit_bytes
        best: _Found | None = None
        looked_at: list[_Variant] = []
        problems: list[SbpError] = []
        for asked, variant in requests_of(request, variants_of):
            try:
                one = _Variant(asked, self.config, limit)
                looked_at.append(one)
                found = one.run(FORBIDDEN_S if best is None else best.seconds)
            except (PlanError, SignatureError) as error:
                problems.append(error)
                continue
            if found is not None:
                best = _Found(variant=variant, seconds=found[0], compiled=found[1])
        if best is None:
            if problems and len(problems) == len(looked_at):
                raise problems[0]
            compiled = sum(one.compilation.num_compiled for one in looked_at)
            least_bytes = min(one.least_bytes for one in looked_at)
            raise MemoryLimitError(
                f"nothing fits the {format_bytes(limit)} of a rank: the least of "
                f"{compiled} plans needs {format_bytes(least_bytes)}",
                todo="raise the limit, or take more ranks or micro-batches",
            )
        num_looked_at = sum(one.search.num_looked_at for one in looked_at)
        of = f", of {len(looked_at)} variants of the step" if len(looked_at) > 1 else ""
        words = f": {variant_words(best.variant)}" if of and best.variant else ""
        report = {
            "cost_s": best.seconds,
            "bound_s": best.seconds,
            "gap": 0.0,
            "unlimited_s": min(best.seconds, *(one.cheapest_s for one in looked_at)),
            "num_looked_at": num_looked_at,
            "explanation": [
                f"exhaustive: the cheapest of all assignments that fit{of}, "
                f"{format_seconds(best.seconds)} without overlap{words}; {num_looked_at} branches"
            ],
        }
        strategy = replace(best.compiled.strategy, variant=best.variant)
        return replace(strategy, report={**strategy.report, **report})


class _Variant:
    """All assignments of one graph.

    Args:
        request: The request to plan.
        config: The settings of the planner.
        limit_bytes: Memory of one rank.

    Raises:
        PlanError: the pins cannot be satisfied.
    """

    def __init__(self, request: PlanRequest, config: ExhaustiveConfig, limit_bytes: float) -> None:
        quiet = replace(request, progress=None)
        pins: Mapping[str, PinValue] = config.pins
        self.request, self.limit_bytes = quiet, limit_bytes
        self.problem = joint_problem(quiet, pins=pins)
        self.compilation = Compilation(request=quiet, limit_bytes=limit_bytes)
        self.search = _Search(self.problem, config.max_assignments, request.progress)
        self.least_bytes = inf
        #: The least seconds of any assignment that was considered, whatever memory it takes.
        self.cheapest_s = inf

    def run(self, below_s: float) -> tuple[float, Compiled] | None:
        """Return (seconds, plan) of the cheapest that fits; None if none takes less than `below_s`.

        Raises:
            ConfigError: there are too many assignments.
            PlanError: no assignment satisfies the pins, whatever it takes.
        """
        search = self.search
        search.bound_s = below_s
        cheapest: tuple[float, tuple[int, ...]] | None = None
        for seconds, values in search.assignments():
            search.bound_s, cheapest = seconds, (seconds, values)
        if cheapest is None:
            if below_s >= FORBIDDEN_S:
                raise PlanError("no assignment fulfils the pins", todo="remove a pin")
            return None
        self.cheapest_s = cheapest[0]
        first = self._compiled(cheapest[1])
        if first.fits:
            return cheapest[0], first
        best: tuple[float, Compiled] | None = None
        search.bound_s = below_s
        for seconds, values in search.assignments():
            found = self._compiled(values)
            if found.fits:
                search.bound_s, best = seconds, (seconds, found)
        return best

    def _compiled(self, values: tuple[int, ...]) -> Compiled:
        decision = self.problem.decided(values)
        strategy = strategy_of(self.request, self.problem.work, decision, planner="exhaustive")
        found = self.compilation.compiled(strategy)
        self.least_bytes = min(self.least_bytes, found.memory_bytes)
        return found


class _Search:
    """Goes depth first through the values of the variables of a step.

    Args:
        problem: The step.
        max_assignments: How many branches may be considered.
        progress: Called with the share of these that was considered.
    """

    def __init__(
        self,
        problem: StepProblem,
        max_assignments: int,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self.problem, self.max_assignments = problem, max_assignments
        self.progress = progress
        self._told = 0
        #: Only assignments that cost less are yielded.
        self.bound_s = FORBIDDEN_S
        self.num_looked_at = 0
        # Storages first, because operators convert from them; then the operators in order.
        order = [*problem.storage_variable.values(), *problem.node_variable.values()]
        self.order = list(dict.fromkeys(order))
        position = {variable: at for at, variable in enumerate(self.order)}
        self.ready: list[list[int]] = [[] for _ in self.order]
        for number, group in enumerate(problem.groups):
            members = [group.source, *group.requests_by_variable()]
            self.ready[max(position[one] for one in members)].append(number)
        least = [float(problem.unary[variable].min()) for variable in self.order]
        self.rest = [*np.cumsum(least[::-1])[::-1], 0.0]

    def assignments(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield (seconds, values) of assignments that cost less than `bound_s`.

        Raises:
            ConfigError: too many branches were considered.
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
        if self.progress and self.num_looked_at >= self._told + _TELL:
            self._told = self.num_looked_at
            self.progress("looking at assignments", self.num_looked_at / self.max_assignments)
        if self.num_looked_at > self.max_assignments:
            power = sum(log10(len(self.problem.unary[one])) for one in self.order)
            raise ConfigError(
                f"more than {self.max_assignments:,} branches were looked at, and "
                f"{len(self.order)} operators and states have some 10^{power:.0f} assignments",
                where="planner.max_assignments",
                accepted="a step of a handful of operators",
                todo="choose planner=ilp, which proves the same without looking at all of them; "
                "or pin more, or take a smaller graph or mesh",
            )
        for step, value in sorted(steps):
            if seconds + step + self.rest[at + 1] < self.bound_s * (1 - _TIE):
                values[variable] = value
                yield from self._from(at + 1, seconds + step, values)

    def _conversions(self, at: int, values: list[int]) -> float:
        """Return the cost of the boxing whose last undecided variable was just decided."""
        return sum(self.problem.groups[number].cost(values) for number in self.ready[at])
