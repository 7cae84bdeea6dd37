"""`CheckedPlanner`: a wrapper of a planner that checks its results; errors name its plugin."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from sbp_core.errors import SbpTypeError
from sbp_core.planning import Planner, PlanRequest, SearchedPlanner, fitted
from sbp_core.plugins import PluginEntry
from sbp_core.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlanner:
    """Calls a planner and checks its result.

    Args:
        planner: The planner.
        entry: The plugin that it comes from; None for an object of the user's program.
    """

    planner: Planner
    entry: PluginEntry | None = None

    @property
    def chooses_variants(self) -> bool:
        """Whether the planner chooses among the variants of a step, including micro-batches."""
        return bool(getattr(self.planner, "chooses_variants", False))

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the planner's strategy; if the planner does not search, fit it into memory.

        Raises:
            PluginError: a plugin raises an error other than `SbpError`, or returns no strategy.
            SbpTypeError: an object of the user returns no strategy.
        """
        with self.entry.called("plan") if self.entry else nullcontext():
            found: object = self.planner.plan(request)
        if isinstance(found, Strategy):
            # The search around other planners fits the strategy itself.
            is_searched = isinstance(self.planner, SearchedPlanner)
            return found if is_searched else fitted(request, found)
        if self.entry is not None:
            raise self.entry.returned(found, "a Strategy", by="plan")
        raise SbpTypeError(
            f"the planner returned {'None' if found is None else f'a {type(found).__name__}'}",
            where=f"{type(self.planner).__qualname__}.plan, the argument planner",
            accepted="a Strategy",
        )
