"""The last plans that were compiled while one was looked for, and what is known of them.

A planner that keeps to a limit compiles what it considers. What it answers is a strategy, which is
compiled to be executed: to the very plan that is kept here.
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

#: Plans that are kept; a search that compiles more takes one of its last, or compiles it again.
_MOST_PLANS = 6


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A plan, what it was compiled from, its memory if that is known, and what else was found."""

    graph: LogicalGraph
    strategy: Strategy
    options: CompileOptions
    plan: PhysicalPlan
    memory: MemoryReport | None = None
    found: dict[Callable[[PhysicalPlan], object], object] = field(default_factory=dict)


@dataclass(slots=True)
class KeptPlans:
    """Compiles strategies; of the last ones, their plans and their memory are at hand.

    Args:
        layouts: Says how results lie, as `call_layouts` does, which is asked if omitted.
    """

    layouts: CallLayouts | None = None
    _kept: deque[_Kept] = field(default_factory=lambda: deque(maxlen=_MOST_PLANS))

    def plan(
        self, graph: LogicalGraph, strategy: Strategy, options: CompileOptions
    ) -> PhysicalPlan:
        """Return the plan of a strategy, whatever it reports.

        The graph tells variants of a step apart, so which one the strategy says is the same.

        Args:
            graph: See `compile_plan`, as for all others.
            strategy: Of the graph.
            options: How it is compiled.

        Raises:
            PlanError: see `compile_plan`, as for all others.
            SignatureError: likewise.
            SbpValueError: likewise.
        """
        silent = replace(strategy, report={}, variant=None)
        for one in self._kept:
            if one.graph is graph and one.options == options and one.strategy == silent:
                return one.plan
        plan = compile_plan(graph, strategy, options)
        self._kept.append(_Kept(graph=graph, strategy=silent, options=options, plan=plan))
        return plan

    def memory(self, plan: PhysicalPlan) -> MemoryReport:
        """Return what a plan holds, as `predict_memory` says.

        Args:
            plan: That `plan` returned.

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
        """Return what a function finds of a plan, such as `simulate`; asked again, the same.

        Args:
            ask: The function.
            plan: Any; what is found of one that `plan` returned is kept.
        """
        kept = next((one for one in self._kept if one.plan is plan), None)
        if kept is None:
            return ask(plan)
        if ask not in kept.found:
            kept.found[ask] = ask(plan)
        return cast(_FoundT, kept.found[ask])

    def known_memory(self, plan: PhysicalPlan) -> MemoryReport | None:
        """Return what a plan holds, if that was predicted."""
        return next((one.memory for one in self._kept if one.plan is plan), None)
