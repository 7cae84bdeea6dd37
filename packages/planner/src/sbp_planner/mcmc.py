"""The planner `mcmc`: a random walk over strategies, judged by the simulated step.

    state       the signature of every operator and the storage of every state, on all mesh axes
    proposal    one of these drawn again; then its neighbours change to their cheapest values, as
                long as that is free, so the change is not a mere detour; equal layers change alike
    accept      with probability min(1, exp((t - t') / T)), t and t' the simulated time of a step of
                the compiled plan before and after, T a share of the best time so far           [s]
    result      the fastest state that fits the memory of a rank

It begins with the result of inference axis by axis. It prices what other planners cannot: overlap
of boxing with compute, buckets of gradients, the bubbles of pipelines. It guarantees nothing, and
is for graphs whose plans compile in a fraction of a second.

Complexity: proposals x compilation. The walk is the same for the same seed, as long as neither
`time_limit_s` nor memory ends it.

Source: Jia, Zaharia, Aiken, "Beyond data and model parallelism for deep neural networks", MLSys
2019 (FlexFlow), section 6 (execution simulator and Metropolis search).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from random import Random
from time import monotonic

from sbp_core.errors import MemoryLimitError, PlanError
from sbp_core.infer import FORBIDDEN_S, StepProblem, joint_problem, strategy_of
from sbp_core.planning import Compiled, PlanContext, SearchedPlanner
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.joint.layers import repeated
from sbp_planner.joint.near import limited
from sbp_planner.search_configs import McmcConfig


@dataclass(frozen=True, slots=True)
class McmcPlanner(SearchedPlanner):
    """Plans by a random walk."""

    config: McmcConfig

    keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the fastest strategy of the walk that fits.

        Raises:
            ConfigError: a pin is invalid.
            PlanError: no state of the walk fits the memory, or the pins cannot be satisfied.
        """
        config, request = self.config, context.request
        quiet = replace(request, progress=None)
        problem = joint_problem(quiet, pins=config.pins)
        limited(problem)
        limit = context.limit_bytes
        compilation = context.compilation()

        def compiled(values: list[int]) -> Compiled:
            decision = problem.decided(values)
            return compilation.compiled(strategy_of(quiet, problem.work, decision, planner="mcmc"))

        walk, random = _Walk(problem), Random(config.seed)
        now = list(problem.start)
        present = best = first = compiled(now)
        ends, accepted, count = monotonic() + context.time_limit_s, 0, 0
        for count in range(1, config.proposals + 1):
            if monotonic() > ends:
                break
            if request.progress:
                request.progress("walking over strategies", count / config.proposals)
            proposed = walk.proposal(now, random)
            if problem.cost(proposed) >= FORBIDDEN_S:
                continue
            try:
                found = compiled(proposed)
            except PlanError:
                continue
            # A state over the limit is left as soon as a proposal needs less memory.
            worse_s = found.step_s - present.step_s
            if not found.fits:
                worse_s = max(worse_s, 0.0) + present.step_s * (
                    found.memory_bytes > present.memory_bytes
                )
            if worse_s <= 0 or random.random() < exp(-worse_s / (config.temperature * best.step_s)):
                now, present = proposed, found
                accepted += 1
            best = min(best, found, key=Compiled.rank)
        if not best.fits:
            raise MemoryLimitError(
                f"no state of a walk of {count} proposals fits the {format_bytes(limit)} of a rank:"
                f" the least needs {format_bytes(best.memory_bytes)}",
                accepted=f"{context.limit_key} >= {best.memory_bytes:.0f}",
                todo="choose planner=osdp or planner=ilp, which look for what fits; or raise the "
                "limit or planner.proposals",
            )
        report = {
            "num_proposals": count,
            "num_accepted": accepted,
            "explanation": [
                f"mcmc: {format_seconds(best.step_s)} a step, {format_seconds(first.step_s)} axis "
                f"by axis; of {count} proposals {accepted} were accepted"
            ],
        }
        return replace(best.strategy, report={**best.strategy.report, **report})


class _Walk:
    """Makes proposals.

    Args:
        problem: The step.
    """

    def __init__(self, problem: StepProblem) -> None:
        self.problem = problem
        self.alike = {v: group for group in repeated(problem) for v in group}
        self.groups_of: dict[int, list[int]] = {}
        for number, group in enumerate(problem.groups):
            for variable in (group.source, *group.requests_by_variable()):
                self.groups_of.setdefault(variable, []).append(number)
        #: Variables that have several allowed values.
        self.free = [v for v, size in enumerate(problem.sizes) if size > 1]

    def proposal(self, values: list[int], random: Random) -> list[int]:
        """Return another state.

        Args:
            values: The present state.
            random: The random generator.
        """
        if not self.free:
            return list(values)
        found = list(values)
        drawn = random.choice(self.free)
        value = random.randrange(self.problem.sizes[drawn])
        todo, done = [(drawn, value)], set()
        while todo:
            variable, value = todo.pop()
            for one in self.alike.get(variable, (variable,)):
                if one not in done:
                    done.add(one)
                    found[one] = value
            # Neighbours follow if that costs them nothing themselves: mostly views.
            for other in self._neighbours(variable) - done:
                best = self._cheapest(other, found)
                if best != found[other]:
                    todo.append((other, best))
        return found

    def _neighbours(self, variable: int) -> set[int]:
        groups = (self.problem.groups[number] for number in self.groups_of.get(variable, ()))
        return {
            one for group in groups for one in (group.source, *group.requests_by_variable())
        } - {variable}

    def _cheapest(self, variable: int, values: list[int]) -> int:
        """Return the cheapest value of a variable, given the values of all other variables."""
        kept = values[variable]
        numbers = self.groups_of.get(variable, ())
        costs = []
        for value, own in enumerate(self.problem.unary[variable]):
            values[variable] = value
            boxing = sum(self.problem.groups[number].cost(values) for number in numbers)
            costs.append((float(own) + boxing, value != kept, value))
        values[variable] = kept
        return min(costs)[2]
