"""The interface of planners: `PlanRequest`, their input, and the protocol `Planner`.

`sbp_core.planning` exports both names. They are defined here because sharding propagation
(`sbp_core.infer`), which may not import `sbp_core.planning`, takes requests, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from sbp_core.cluster import Cluster
from sbp_core.compile import CompileOptions
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import GraphFamily, GraphVariant
from sbp_core.memory import KeptPlans
from sbp_core.placement import Placement
from sbp_core.strategy import Strategy

__all__ = ["PlanRequest", "Planner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The input of a planner: a graph, a mesh, a cluster and the user's pins (fixed shardings).

    Args:
        graph: The training step at micro-batch size, with accumulation made explicit.
        mesh: All ranks, with named axes.
        cluster: Rates and links of the machine.
        pins: User constraints: name pattern (`fnmatch`; `batch` means every batch input) of an
            input, parameter or value -> `"S(0)"` on a 1-axis mesh, `"S(0), B"`, or `{axis name:
            "S(0)"}` which leaves other axes free.
        progress: Called with (what, fraction done in [0, 1]).
        options: How the plan will be compiled; the compiler's defaults for the cluster if None.
        regather: The `regather` of the resulting strategies; see `Strategy`.
        family: The variants of the step, for planners that choose among them; None if `graph` is
            the only one. A strategy for another graph of the family names its `variant`.
        offloaded: States in host memory (`Storage.offloaded`), by the user's or a planner's
            decision: all strategies for the request keep them there, and count their copies.
        kept: A cache of the last compiled plans, so that the chosen one need not be compiled again.

    Raises:
        ConfigError: the mesh has ranks that the cluster does not have.
    """

    graph: LogicalGraph
    mesh: Placement
    cluster: Cluster
    pins: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    progress: Callable[[str, float], None] | None = None
    options: CompileOptions | None = None
    regather: tuple[str, ...] = ("*",)
    family: GraphFamily | None = None
    offloaded: frozenset[str] = frozenset()
    kept: KeptPlans = field(default_factory=KeptPlans, compare=False)

    def __post_init__(self) -> None:
        self.cluster.check_ranks(self.mesh)

    def of(self, variant: GraphVariant) -> PlanRequest:
        """Return a request to plan only one variant of the step.

        Raises:
            SbpError: see `GraphFamily.graph`.
        """
        assert self.family is not None, "only a family has variants"
        return replace(self, graph=self.family.graph(variant), family=None)


class Planner(Protocol):
    """Interface of kind `planner`: `build(config)` returns an object that plans."""

    def plan(self, request: PlanRequest) -> Strategy:
        """Return a legal strategy for the graph, or raise `PlanError` naming the violated limit."""
        ...
