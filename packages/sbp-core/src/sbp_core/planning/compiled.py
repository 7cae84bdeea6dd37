"""Evaluate a strategy: compile its plan, simulate its time, and predict its exact memory.

All planners that compare plans compare these figures, which are also the figures that users see.
The memory of the compiled plan has to stay below the limit. Without a tensor library, which knows
how results are laid out, an upper bound of that memory is compared instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbp_core.compile import CompileOptions, PhysicalPlan
from sbp_core.errors import PlanError, SbpLookupError
from sbp_core.memory import MemoryReport, memory_bound, offloaded_bytes
from sbp_core.plan_request import PlanRequest
from sbp_core.simulation import simulate
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds


def limit_key(memory_bytes: float | None) -> str:
    """Return the setting that limits the memory of a rank: the planner's, or the cluster's."""
    return f"{'cluster' if memory_bytes is None else 'planner'}.memory_bytes"


def variant_of(request: PlanRequest, strategy: Strategy) -> PlanRequest:
    """Return the request for the variant of the step that a strategy is for."""
    quiet = replace(request, progress=None)
    if quiet.family is None or strategy.variant is None:
        return replace(quiet, family=None)
    return quiet.of(strategy.variant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A strategy with the predicted time and memory of its compiled plan.

    Args:
        strategy: The strategy that was compiled.
        step_s: Predicted time of a step, in seconds.
        host_bytes: Host memory of the rank that has the most of it.
        memory_bytes: Peak memory of the fullest rank; if an upper bound already fits the limit,
            that bound, which is cheaper to compute.
        is_exact: Whether `memory_bytes` is exact, not a bound.
        fits: Whether both memories are within their limits.
    """

    strategy: Strategy
    step_s: float
    memory_bytes: float
    is_exact: bool
    fits: bool
    host_bytes: float = 0.0

    def __str__(self) -> str:
        at_most = "" if self.is_exact else "at most "
        short = "" if self.fits else ", does not fit"
        beside = f" and {format_bytes(self.host_bytes)} on the host" if self.host_bytes else ""
        size = f"{at_most}{format_bytes(self.memory_bytes)}{beside}"
        return f"{format_seconds(self.step_s)} a step, {size}{short}"

    def rank(self) -> tuple[bool, float, float]:
        """Return a key that is less for a better plan: one that fits, then fast, then small."""
        return not self.fits, self.step_s, self.memory_bytes


@dataclass(slots=True, kw_only=True)
class Compilation:
    """Compiles the strategies of one request, and keeps the last plans (`PlanRequest.kept`).

    Args:
        request: The request that is planned.
        limit_bytes: Limit of the memory of one rank.
    """

    request: PlanRequest
    limit_bytes: float
    num_compiled: int = 0

    def compiled(self, strategy: Strategy, *, exact: bool = False) -> Compiled:
        """Return a strategy with the predicted time and memory of its plan.

        Args:
            strategy: A strategy for the graph of the request.
            exact: Whether to compute the exact memory even if a bound fits the limit.

        Raises:
            PlanError: the strategy cannot be compiled.
        """
        plan = self.plan(strategy)
        memory_bytes, host_bytes, is_exact = self.memory(plan, exact=exact)
        return Compiled(
            strategy=strategy,
            step_s=self.step_s(plan),
            memory_bytes=memory_bytes,
            is_exact=is_exact,
            host_bytes=host_bytes,
            fits=memory_bytes <= self.limit_bytes and host_bytes <= self.host_limit_bytes,
        )

    @property
    def host_limit_bytes(self) -> float:
        """A rank's share of the memory of its host; 0 if its device has none."""
        return self.request.cluster.device.host_memory_bytes or 0

    def plan(self, strategy: Strategy) -> PhysicalPlan:
        """Return the compiled plan of a strategy.

        Raises:
            PlanError: the strategy cannot be compiled.
        """
        request = self.request
        options = request.options or CompileOptions(cluster=request.cluster)
        self.num_compiled += 1
        return self.request.kept.plan(request.graph, strategy, options)

    def step_s(self, plan: PhysicalPlan) -> float:
        """Return the predicted time of a step of a plan, in seconds."""
        return self.request.kept.asked(simulate, plan).step_s

    def memory(self, plan: PhysicalPlan, *, exact: bool = False) -> tuple[float, float, bool]:
        """Return the memory of the fullest rank on its device and its host, and whether exact.

        In bytes. If it is not exact, it is an upper bound: either it fits, or no tensor library is
        installed to compute the exact memory.

        Args:
            plan: The plan.
            exact: Whether to compute the exact memory even if a bound fits the limit.
        """
        bound, host_bytes = memory_bound(plan, self.request.graph), offloaded_bytes(plan)
        if bound <= self.limit_bytes and host_bytes <= self.host_limit_bytes and not exact:
            return bound, host_bytes, False
        found = self.report(plan)
        if found is None:
            return bound, host_bytes, False
        return float(found.peak), float(found.host_peak), True

    def report(self, plan: PhysicalPlan) -> MemoryReport | None:
        """Return the exact memory of each rank; None without a tensor library."""
        try:
            return self.request.kept.memory(plan)
        except (SbpLookupError, PlanError):
            return None

    def by_rank(self, plan: PhysicalPlan) -> dict[int, int]:
        """Return the device memory of each rank, in bytes; a bound without a tensor library."""
        found = self.report(plan)
        if found is None:
            bound = int(memory_bound(plan, self.request.graph))
            return {part.rank: bound for part in plan.ranks}
        return {rank: one.peak for rank, one in found.ranks.items()}
