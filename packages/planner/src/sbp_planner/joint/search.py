"""The search over all mesh axes at once, under the exact memory of compiled plans.

1. Solve the choice problem of the step without memory. If the compiled plan of that fits, done.
2. Else with memory over time (`joint.lifetime`), whose limit is corrected by what the compiled plan
   holds beside what was counted, until plans that fit and limits whose plans do not are next to
   each other or the tries are used up. The fastest plan that fits is taken.

The bound is that of the choice problem without a limit, or of the one whose plan was taken: no
assignment of all signatures costs less, serially and without overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic

from sbp_core.errors import PlanError
from sbp_core.infer import PinValue, Pipelined, joint_problem, strategy_of
from sbp_core.plugins import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes
from sbp_planner.choice import ChoiceSolution, solve
from sbp_planner.compiled import Compilation, Compiled
from sbp_planner.joint.lifetime import Held, held
from sbp_planner.joint.lower import LoweredStep, lower_step

#: Limits that are tried, each with a choice problem solved and a plan compiled.
MAX_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSettings:
    """How to search.

    Args:
        planner: Name for the strategy.
        time_limit_s: For each choice problem, in seconds.
        gap: Relative distance to the bound at which the search may end.
        tied: Whether equal layers are decided alike.
    """

    planner: str
    time_limit_s: float = 60.0
    gap: float = 0.0
    tied: bool = True


def plan_jointly(
    request: PlanRequest,
    settings: JointSettings,
    *,
    limit_bytes: float,
    pins: Mapping[str, PinValue] | None = None,
    stages: Pipelined | None = None,
) -> Strategy:
    """Return the cheapest strategy that fits.

    Args:
        request: What to plan.
        settings: How.
        limit_bytes: Memory of one rank.
        pins: The planner's own.
        stages: Of a pipeline; the mesh as one stage if None.

    Raises:
        ConfigError: a pin cannot be meant.
        PlanError: nothing that was found fits; says what was.
    """
    return _Search(request, settings, limit_bytes, pins or {}, stages).run()


class _Search:
    def __init__(
        self,
        request: PlanRequest,
        settings: JointSettings,
        limit_bytes: float,
        pins: Mapping[str, PinValue],
        stages: Pipelined | None,
    ) -> None:
        self.request, self.settings, self.limit_bytes = request, settings, limit_bytes
        self.stages = stages
        quiet = replace(request, progress=None)
        self.problem = joint_problem(
            quiet, pins=pins, stages=stages.stages if stages is not None else None
        )
        self.compilation = Compilation(request=quiet, limit_bytes=limit_bytes)
        self.started = monotonic()

    def run(self) -> Strategy:
        first = self.solved(None)
        if first is None:
            raise PlanError(
                "no assignment of signatures on all mesh axes fulfils the pins",
                todo="remove a pin",
            )
        best, compiled = first, self.compiled(first)
        if not compiled.fits:
            found = self.within_memory(first, compiled)
            if found is None:
                raise PlanError(
                    f"no plan that was found fits the {format_bytes(self.limit_bytes)} of a rank: "
                    f"the least needs {format_bytes(self.least_bytes)}",
                    todo="raise trainer.micro_batches, recompute (compile.passes.recompute), or "
                    "take more ranks",
                )
            best, compiled = found
        return self.reported(best, compiled)

    def within_memory(self, first: _Solved, compiled: Compiled) -> tuple[_Solved, Compiled] | None:
        """Return the fastest plan that fits, of limits that close in on where plans fit."""
        counted = held(self.problem, self.limit_bytes)
        above, below = float(counted.peak_bytes(first.values)), 0.0
        wanted = above + self.limit_bytes - compiled.memory_bytes
        self.least_bytes = compiled.memory_bytes
        found: tuple[_Solved, Compiled] | None = None
        for _ in range(MAX_TRIES):
            if not below < wanted < above:
                wanted = (below + above) / 2
            solved = self.solved(counted.within(wanted))
            if solved is None:
                below = wanted
                if found is not None:
                    break
                continue
            compiled = self.compiled(solved)
            peak = counted.peak_bytes(solved.values)
            self.least_bytes = min(self.least_bytes, compiled.memory_bytes)
            if compiled.fits:
                below = wanted
                if found is None or compiled.rank() < found[1].rank():
                    found = solved, compiled
            else:
                above = min(wanted, float(peak))
            if above - below < 0.01 * self.limit_bytes:
                break
            wanted = peak + self.limit_bytes - compiled.memory_bytes
        return found

    def solved(self, memory: Held | None) -> _Solved | None:
        """Return the cheapest assignment within a limit; None if none was found."""
        lowered = lower_step(self.problem, tied=self.settings.tied, held=memory)
        progress = self.request.progress
        if progress is not None:
            progress("choosing signatures on all mesh axes", 0.5)
        solution = solve(
            lowered.choice,
            time_limit_s=self.settings.time_limit_s,
            gap=self.settings.gap,
            start=lowered.assignment(self.problem.start),
        )
        if solution.assignment is None:
            return None
        return _Solved(lowered=lowered, solution=solution)

    def compiled(self, solved: _Solved) -> Compiled:
        return self.compilation.compiled(self.strategy(solved))

    def strategy(self, solved: _Solved) -> Strategy:
        stages = self.stages
        return strategy_of(
            replace(self.request, progress=None),
            self.problem.work,
            self.problem.decided(solved.values),
            planner=self.settings.planner,
            in_flight=stages.in_flight if stages is not None else None,
            orders=stages.orders if stages is not None else (),
            staleness=stages.staleness if stages is not None else (),
        )

    def reported(self, best: _Solved, compiled: Compiled) -> Strategy: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """A solution of the choice problem of a step."""

    lowered: LoweredStep
    solution: ChoiceSolution

    @property
    def values(self) -> tuple[int, ...]:
        assert self.solution.assignment is not None, "only what was found is kept"
        return self.lowered.values(self.solution.assignment)
