"""Choose how every operator and state of a step is split, over all mesh axes, within memory.

The planner `ilp` uses this through `joint.family`.

1. Without memory: elimination (`sbp_core.infer.minimise`), starting from the result axis by axis;
   then a proof by moved costs (`choice.prove`); if a gap remains, an integer program
   (`sbp_planner.choice`). If the compiled plan of the result fits, the search is done.
2. Otherwise with memory over time (`joint.lifetime`), by an integer program; if that would be too
   large, by a price on memory (`joint.priced`). The limit is corrected by what compiled plans hold
   (`sbp_core.planning.LimitSearch`), and the fastest plan that fits is taken.

The bound is that of step 1: whatever memory there is, no assignment costs less, serially and
without overlap. With equal layers tied, it holds for tied assignments. If there are too many
signatures, such as on three mesh axes, step 1 is repeated near its result (`joint.near`), and the
bound for all signatures is proved with lower bounds of the prices.

If another variant of the step is known to take no more than some time (`joint.family`), assignments
that cost no less do not matter: a bound that reaches that time ends the search (`cutoff_s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import Any

from sbp_core.errors import MemoryLimitError, PlanError
from sbp_core.infer import (
    FORBIDDEN_S,
    PINS,
    CostTables,
    PinValue,
    SharedTables,
    StepWork,
    joint_problem,
    minimise,
    one_forward_one_backward,
    strategy_of,
)
from sbp_core.planning import Compilation, Compiled, LimitSearch, PlanRequest, search_limits
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.choice import solve
from sbp_planner.choice.prove import prove
from sbp_planner.joint.layers import repeated, tie
from sbp_planner.joint.lifetime import VariableMemory, held, least_stored_bytes, waiting_bytes
from sbp_planner.joint.lower import lower_step
from sbp_planner.joint.near import MAX_DIRECT_ENTRIES, least_s, limited, recentred
from sbp_planner.joint.priced import PricedMemory

#: How many limits are tried, each with a choice problem solved and a plan compiled. Large steps,
#: whose plans take long to compile, have fewer.
MAX_TRIES, MAX_LARGE_TRIES = 8, 4

#: Counted limits that differ by less than this share of the limit are treated as equal.
RESOLUTION = 0.01

#: Steps of more variables than this use a price on memory instead of an integer program.
MAX_PROGRAM_VARIABLES = 600

#: Most entries in a table of the first elimination.
MAX_ENTRIES = 1 << 16

#: Most entries in a table of an elimination at a price on memory; there are many of these.
MAX_PRICED_ENTRIES = 1 << 14

#: An integer program with more pairs of strategies than this is not tried.
MAX_PAIRS = 4_000_000

#: Rounds around the result so far, if not all signatures are considered. They end with a gain of
#: less than this share.
MAX_ROUNDS, _LEAST_GAIN = 3, 1e-4

#: A gap of less than this share counts as none: sums in another order differ.
_ROUNDING = 1e-9

#: Share of the time for the proof; the rest is for the integer program.
_PROOF_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSettings:
    """How to search.

    Args:
        planner: Name of the planner, for the strategy.
        time_limit_s: Seconds for each search for an assignment.
        gap: Relative distance to the bound at which a search may end.
        tied: Whether equal layers are decided alike.
        limit_key: The setting that limits the memory of a rank, for messages.
    """

    planner: str
    time_limit_s: float = 60.0
    gap: float = 0.0
    tied: bool = True
    limit_key: str = "cluster.memory_bytes"

    @property
    def proof_s(self) -> float:
        """Seconds for the proof of one assignment."""
        return _PROOF_SHARE * self.time_limit_s


#: A value of each variable of the step.
Values = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedAssignment:
    """An assignment, and a proved bound.

    Args:
        values: A value of each variable of the step.
        bound_s: No assignment costs less, in seconds of a step.
    """

    values: Values
    bound_s: float


class JointSearch:
    """The search for one graph.

    Args:
        request: The request to plan.
        settings: How to search.
        limit_bytes: Memory of one rank.
        pins: The pins of the planner itself.
        tables: Shared with searches for other variants of the step.
        known: The prepared work of an earlier problem of this variant, to be used again.
    """

    def __init__(
        self,
        request: PlanRequest,
        settings: JointSettings,
        limit_bytes: float,
        pins: Mapping[str, PinValue],
        *,
        tables: SharedTables | None = None,
        known: StepWork | None = None,
    ) -> None:
        self.request, self.settings, self.limit_bytes = request, settings, limit_bytes
        self._say("posing all mesh axes as one problem", 0.0)
        quiet = replace(request, progress=None)
        self.problem = joint_problem(
            quiet, pins=pins, tied=settings.tied, tables=tables, known=known
        )
        #: The least bytes of a plan: the states, however they are stored.
        self.least_stored_bytes = least_stored_bytes(self.problem)
        #: Whether some signatures are left out, and how many signatures there are.
        self.num_signatures = sum(self.problem.sizes)
        self.is_limited = limited(self.problem, tied=settings.tied)
        #: The bound for all signatures, if some of them are left out.
        self.least_s = 0.0
        self.by_axis_s = self.problem.cost(self.problem.start)
        self.step = tie(self.problem, tied=settings.tied)
        self.compilation = Compilation(request=quiet, limit_bytes=limit_bytes)
        self.plans: dict[Values, Compiled] = {}
        self.least_bytes = inf
        self.priced: PricedMemory | None = None

    @property
    def is_hopeless(self) -> bool:
        """Whether not even the states fit, however they are stored."""
        return self.least_stored_bytes > self.limit_bytes

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the number of micro-batches whose saved activations it may hold."""
        work = self.problem.work
        return one_forward_one_backward(len(work.placements), work.graph.num_micro_batches)

    def run(self) -> Strategy:
        """Return the fastest strategy that was found and fits.

        Raises:
            PlanError: nothing fits, or the pins cannot be satisfied.
        """
        free = self.cheapest()
        best = self.fitting(free)
        if best is None:
            raise self.refusal(
                "raise trainer.micro_batches, recompute (compile.passes.recompute), or take more "
                "ranks"
            )
        return self.reported(best, free)

    def cheapest(self, cutoff_s: float = inf) -> BoundedAssignment:
        """Return the cheapest assignment whatever memory it takes, and a bound of all assignments.

        Args:
            cutoff_s: Once the bound is no less than this, the assignment does not matter.

        Raises:
            PlanError: the pins cannot be satisfied.
        """
        free = self.free(cutoff_s)
        if self.is_limited:
            if free.bound_s < cutoff_s:
                free = self.around(free)
            self._say("proving that no other signatures cost less", 0.5)
            self.least_s = least_s(
                self.problem,
                min(self.problem.cost(free.values), cutoff_s),
                tied=self.settings.tied,
                time_limit_s=self.settings.time_limit_s,
            )
        return free

    def bound_s(self, free: BoundedAssignment) -> float:
        """Return the bound for all assignments, also with signatures that were left out."""
        return self.least_s if self.is_limited else free.bound_s

    def fitting(self, free: BoundedAssignment, cutoff_s: float = inf) -> Values | None:
        """Return the fastest assignment that was found and fits; None if there is none.

        Args:
            free: The cheapest of all assignments.
            cutoff_s: Assignments that cost no less are not looked for.
        """
        if self.is_hopeless:
            return None
        # If even the states and saved activations do not fit, the plan is not compiled.
        kept = waiting_bytes(self.problem, free.values, self.in_flight)
        first = self.compiled(free.values) if kept <= self.limit_bytes else None
        if first is not None and first.fits:
            return free.values
        return self.within_memory(free.values, first, cutoff_s)

    def around(self, free: BoundedAssignment) -> BoundedAssignment:
        """Search near an assignment, then near the result, while that gains something.

        The result belongs to the last problem, `self.problem`, and is near its start.
        """
        ends = monotonic() + self.settings.time_limit_s
        for _ in range(MAX_ROUNDS):
            cost = self.problem.cost(free.values)
            if cost > (1 - _LEAST_GAIN) * self.problem.cost(self.problem.start):
                break
            tied = self.settings.tied
            self.problem = recentred(self.problem, free.values, tied=tied)
            self.step = tie(self.problem, tied=tied)
            free = self.free()
            if monotonic() > ends:
                break
        return free

    def free(self, cutoff_s: float = inf) -> BoundedAssignment:
        """Return the cheapest assignment of the signatures that are left, and their bound.

        Raises:
            PlanError: the pins cannot be satisfied.
        """
        settings, problem, step = self.settings, self.problem, self.step
        ends = monotonic() + settings.time_limit_s
        self._say("eliminating operators on all mesh axes", 0.1)
        tables = CostTables(step, max_entries=MAX_DIRECT_ENTRIES)
        start: Values = tuple(tables.start)
        gap = settings.gap
        deadline = ends - (settings.time_limit_s - settings.proof_s)
        wanted = cutoff_s * (1 - gap)
        if wanted < inf and self.is_limited:
            # With all signatures, `bound_from_below` has proved a bound before.
            proof = prove(
                tables.sizes, tables.factors, start, gap=gap, deadline=deadline, cutoff=cutoff_s
            )
            if proof.bound >= wanted:
                return BoundedAssignment(values=step.expanded(proof.values), bound_s=proof.bound)
            start = proof.values
        start = minimise(tables.sizes, tables.factors, start, max_entries=MAX_ENTRIES).values
        self._say("proving that no assignment costs less", 0.3)
        proof = prove(
            tables.sizes, tables.factors, start, gap=gap, deadline=deadline, cutoff=cutoff_s
        )
        values = step.expanded(proof.values)
        cost, bound = problem.cost(values), proof.bound
        # The start may differ between equal layers, because inference decides them separately.
        if problem.cost(problem.start) < cost:
            values, cost = tuple(problem.start), problem.cost(problem.start)
        if proof.gap <= max(gap, _ROUNDING) or bound >= wanted or monotonic() > ends:
            return self._allowed(BoundedAssignment(values=values, bound_s=min(bound, cost)))
        lowered = lower_step(step)
        pairs = sum(table.size for table in lowered.choice.edge_costs)
        if pairs <= MAX_PAIRS:
            self._say("closing the gap with an integer program", 0.5)
            solution = solve(
                lowered.choice,
                time_limit_s=max(ends - monotonic(), 1.0),
                gap=gap,
                start=lowered.assignment(proof.values[: len(step.unary)]),
            )
            bound = max(bound, solution.bound)
            if solution.assignment is not None:
                other = step.expanded(lowered.values(solution.assignment))
                if problem.cost(other) < cost:
                    values, cost = other, problem.cost(other)
        return self._allowed(BoundedAssignment(values=values, bound_s=min(bound, cost)))

    def _allowed(self, found: BoundedAssignment) -> BoundedAssignment:
        if self.problem.cost(found.values) >= FORBIDDEN_S:
            raise PlanError(
                "no assignment of signatures on all mesh axes that was found fulfils the pins",
                where=PINS,
                todo="remove a pin",
            )
        return found

    def refusal(self, todo: str) -> MemoryLimitError:
        """Return the error for a limit that no plan that was found keeps.

        Args:
            todo: Advice for the message.
        """
        limit = format_bytes(self.limit_bytes)
        what = f"no plan that was found fits the {limit} of a rank: the least needs "
        accepted, least = ">=", self.least_bytes
        if self.is_hopeless:
            what = f"no plan fits the {limit} of a rank: the states alone need at least "
            accepted, least, todo = ">", float(self.least_stored_bytes), "take more ranks"
        return MemoryLimitError(
            f"{what}{format_bytes(least)}",
            where=f"planner {self.settings.planner}",
            accepted=f"{self.settings.limit_key} {accepted} {least:.0f}",
            todo=todo,
        )

    def within_memory(
        self, free: Values, first: Compiled | None, cutoff_s: float = inf
    ) -> Values | None:
        """Return the fastest plan that fits, of limits that close in on where plans fit.

        Args:
            free: The fastest assignment of all.
            first: Its plan, which does not fit; None if it was not compiled.
            cutoff_s: Assignments that cost no less need not be compiled.
        """
        counted = held(self.problem, self.limit_bytes, self.in_flight)
        is_large = len(counted.usages) > MAX_PROGRAM_VARIABLES
        num_tries = MAX_LARGE_TRIES if is_large else MAX_TRIES
        above = float(counted.peak_bytes(free))
        wanted = self.limit_bytes
        if first is not None:
            wanted += above - first.memory_bytes
        if is_large:
            # Compiled plans hold more than is counted, so places beyond `wanted` are full.
            within, entries = counted.within(wanted), MAX_PRICED_ENTRIES
            self.priced = PricedMemory(self.problem, self.step, within, free, max_entries=entries)
        best: tuple[Values, Compiled] | None = None

        def choose(limit_bytes: float) -> Values | None:
            self._say("choosing within memory", 1 - 0.4 * search.tries / num_tries)
            values = self.within(counted.within(limit_bytes))
            # Plans of lower limits are compiled already; those that cost too much need not be.
            if values is None or values in self.plans or self.problem.cost(values) >= cutoff_s:
                return None
            return values

        def compiled() -> list[float]:
            nonlocal best
            assert search.asked is not None, "it is compiled because it was chosen"
            found = self.compiled(search.asked)
            if found.fits and (best is None or found.rank() < best[1].rank()):
                best = search.asked, found
            return [found.memory_bytes]

        search = LimitSearch(
            limit_bytes=self.limit_bytes,
            choose=choose,
            counted=counted.peak_bytes,
            wanted=wanted,
            above=above,
            resolution_bytes=RESOLUTION * self.limit_bytes,
            tries=num_tries,
        )
        search_limits([search], compiled)
        if best is not None:
            return best[0]
        if self.priced is not None:
            # The leanest assignment is the last resort, and the one that the message names.
            leanest = self.priced.leanest()
            if self.problem.cost(leanest) < cutoff_s and self.compiled(leanest).fits:
                return leanest
        return None

    def within(self, memory: VariableMemory) -> Values | None:
        """Return the cheapest assignment within a counted limit; None if none was found."""
        if self.priced is not None:
            return self.priced.within(memory.limit_bytes)
        ties = repeated(self.problem) if self.settings.tied else ()
        lowered = lower_step(self.problem, ties=ties, held=memory)
        solution = solve(
            lowered.choice,
            time_limit_s=self.settings.time_limit_s / MAX_TRIES,
            gap=max(self.settings.gap, 1e-3),
        )
        if solution.assignment is None:
            return None
        return lowered.values(solution.assignment)

    def compiled(self, values: Values) -> Compiled:
        """Compile an assignment, unless it was compiled before."""
        if values not in self.plans:
            found = self.compilation.compiled(self.strategy(values, is_predicted=False))
            self.plans[values] = found
            self.least_bytes = min(self.least_bytes, found.memory_bytes)
        return self.plans[values]

    def strategy(self, values: Values, *, is_predicted: bool) -> Strategy:
        """Return the strategy of an assignment."""
        return strategy_of(
            replace(self.request, progress=None),
            self.problem.work,
            self.problem.decided(values),
            planner=self.settings.planner,
            is_predicted=is_predicted,
        )

    def reported(self, best: Values, free: BoundedAssignment) -> Strategy:
        """Return the strategy, with the results and proofs in its report.

        Args:
            best: The chosen assignment.
            free: The best without a limit of memory, whose bound holds for all.
        """
        problem = self.problem
        cost, by_axis = problem.cost(best), self.by_axis_s
        bound = min(self.bound_s(free), cost)
        gap = (cost - bound) / cost if cost > 0 else 0.0
        tied = ", equal layers alike," if self.settings.tied else ""
        lines = [
            f"{self.settings.planner}: {format_seconds(cost)} a step without overlap, "
            f"{format_seconds(by_axis)} axis by axis; no assignment{tied} takes less than "
            f"{format_seconds(bound)} (gap {gap:.2%})"
        ]
        if self.is_limited:
            lines.append(
                f"  {self.num_signatures} signatures are too many: {sum(problem.sizes)} are looked "
                f"at, which differ on one mesh axis from what was found; none of these takes less "
                f"than {format_seconds(min(free.bound_s, cost))}, and all others are bounded by "
                "what conversions take at least"
            )
        if best != free.values:
            lines.append(
                f"  memory: the fastest without a limit takes "
                f"{format_seconds(problem.cost(free.values))} and does not fit "
                f"{format_bytes(self.limit_bytes)}; {self.compilation.num_compiled} plans were "
                "compiled"
            )
        report: dict[str, Any] = {
            **({"bound_near_s": min(free.bound_s, cost)} if self.is_limited else {}),
            "cost_s": cost,
            "unlimited_s": problem.cost(free.values),
            "cost_by_axis_s": by_axis,
            "bound_s": bound,
            "gap": gap,
            "num_compiled": self.compilation.num_compiled,
            "explanation": lines,
        }
        strategy = self.strategy(best, is_predicted=True)
        return replace(strategy, report={**strategy.report, **report})

    def _say(self, what: str, fraction: float) -> None:
        if self.request.progress is not None:
            self.request.progress(what, fraction)
