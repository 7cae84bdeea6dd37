"""A cache of the plans that were compiled last, with their memory and other findings.

A planner that keeps to a memory limit compiles the candidates that it considers. It returns a
strategy, which is then compiled to be executed: this cache returns the plan that exists already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.graph.ir import LogicalGraph
from sbp_core.memory.prediction import call_layouts, predict_memory
from sbp_core.memory.reports import MemoryReport
from sbp_core.memory.storage_view import CallLayouts
from sbp_core.strategy import Strategy

_FoundT = TypeVar("_FoundT")

#: Plans that are kept. A search that returns an earlier one compiles it again.
_MOST_PLANS = 6


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A plan, the arguments of its compilation, its memory if known, and further findings."""

    graph: LogicalGraph
    strategy: Strategy
    options: CompileOptions
    plan: PhysicalPlan
    memory: MemoryReport | None = None
    found: dict[Callable[[PhysicalPlan], object], object] = field(default_factory=dict)


@dataclass(slots=True)
class KeptPlans:
    """A compiler of strategies that caches the last plans and their memory.

    Args:
        layouts: Computes the memory layout of results; `call_layouts` if omitted.
    """

    layouts: CallLayouts | None = None
    _kept: deque[_Kept] = field(default_factory=lambda: deque(maxlen=_MOST_PLANS))

    def plan(
        self, graph: LogicalGraph, strategy: Strategy, options: CompileOptions
    ) -> PhysicalPlan:
        """Return the plan of a strategy, from the cache or newly compiled.

        The strategy's variant and report do not matter: each variant has its own graph.

        Args:
            graph: The graph.
            strategy: A strategy for the graph.
            options: Options of the compilation.

        Raises:
            PlanError, SignatureError, SbpValueError: see `compile_plan`.
        """
        options = replace(options, bucket_bytes=options.most_bucket_bytes(strategy))
        silent = replace(strategy, report={}, variant=None, bucket_bytes=None)
        for one in self._kept:
            if one.graph is graph and one.options == options and one.strategy == silent:
                return one.plan
        plan = compile_plan(graph, strategy, options)
        self._kept.append(_Kept(graph=graph, strategy=silent, options=options, plan=plan))
        return plan

    def memory(self, plan: PhysicalPlan) -> MemoryReport:
        """Return the memory of a plan, as `predict_memory` does.

        Args:
            plan: A plan that `plan` returned.

        Raises:
            SbpLookupError: no tensor library is installed.
            PlanError: the layout of a result is not known.
        """
        known = self.known_memory(plan)
        if known is None:
            self.layouts = self.layouts or call_layouts()
            known = predict_memory(plan, layouts=self.layouts)
            for one in self._kept:
                if one.plan is plan:
                    one.memory = known
        return known

    def asked(self, ask: Callable[[PhysicalPlan], _FoundT], plan: PhysicalPlan) -> _FoundT:
        """Return the result of a function for a plan, such as `simulate`, from the cache if known.

        Args:
            ask: The function.
            plan: The plan; the result is cached if `plan` returned it.
        """
        kept = next((one for one in self._kept if one.plan is plan), None)
        if kept is None:
            return ask(plan)
        if ask not in kept.found:
            kept.found[ask] = ask(plan)
        return cast(_FoundT, kept.found[ask])

    def known_memory(self, plan: PhysicalPlan) -> MemoryReport | None:
        """Return the memory of a plan if it has been predicted, else None."""
        return next((one.memory for one in self._kept if one.plan is plan), None)
