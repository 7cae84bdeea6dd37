"""Make strategies that keep chosen states in host memory instead of on the device (offloading).

The states are tensors that only the optimizer uses, such as Adam's moments. The user's setting
`planner.offload` may name them. During planning, `search` decides whether to offload, and
`offload_fit` finds the fewest states that make a plan fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from sbp_core.compile import offloadable, owner_of
from sbp_core.cost import host_copy_time_s, local_bytes
from sbp_core.errors import ConfigError, suggestion
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.plan_request import PlanRequest
from sbp_core.planning.offload_setting import no_host
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds

#: Stands for all states of the optimizer, as in pins.
ALL_STATES = "optimizer_states"

#: The beginning of the line of a report that lists the offloaded states.
_TOLD = "offloaded:"


def states_named(request: PlanRequest, patterns: Sequence[str]) -> frozenset[str]:
    """Return the states that the patterns of the setting `offload` name.

    Args:
        request: The request that is planned.
        patterns: Patterns of state names; `optimizer_states` for all that can be offloaded.

    Raises:
        ConfigError: a pattern names no state, or the devices have no separate host memory.
    """
    names: dict[str, None] = {}
    for pattern in patterns:
        names |= dict.fromkeys(_meant(request.graph, pattern))
    if names and request.cluster.device.host_memory_bytes is None:
        raise no_host(tuple(patterns), request.cluster.name)
    return frozenset(names)


def offloading(request: PlanRequest, strategy: Strategy, patterns: Sequence[str]) -> Strategy:
    """Return a strategy that keeps the states of some patterns in host memory.

    Args:
        request: The request that is planned.
        strategy: A strategy for the graph of the request.
        patterns: See `states_named`.

    Raises:
        ConfigError: see `states_named`.
    """
    if not patterns:
        return strategy
    return with_states(request, strategy, states_named(request, patterns))


def _meant(graph: LogicalGraph, pattern: str) -> list[str]:
    """Return the states that a pattern names.

    Raises:
        ConfigError: the pattern names none.
    """
    can = offloadable(graph)
    if pattern == ALL_STATES:
        found = [n for n in can if graph.input_kinds[n].kind is InputKind.OPTIMIZER_STATE]
    else:
        # A state that only looks offloadable is refused later, in the strategy.
        states = [e.name for e in graph.inputs if e.kind.is_state and graph.is_tensor(e.name)]
        found = [name for name in states if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigError(
            f"planner.offload: {pattern!r} names no state that can be offloaded",
            accepted=f"{ALL_STATES}, or patterns of states that only the optimizer uses, such as "
            f"{can[0]!r}"
            if can
            else "none: this optimizer keeps no tensors",
            todo=suggestion(pattern, (ALL_STATES, *can)),
        )
    return found


def with_states(request: PlanRequest, strategy: Strategy, names: Collection[str]) -> Strategy:
    """Return a strategy that offloads exactly these states; its report has the cost.

    Args:
        request: The request that is planned.
        strategy: A strategy for a graph with the same states as the request's.
        names: Names of the states.
    """
    chosen = frozenset(names)
    storage = {
        name: one if one.offloaded == (name in chosen) else replace(one, offloaded=name in chosen)
        for name, one in strategy.storage.items()
    }
    report = {**strategy.report}
    told = [line for line in report.get("explanation", ()) if not line.startswith(_TOLD)]
    if chosen:
        device = request.cluster.device
        sizes = sizes_by_stage(request.graph, strategy, chosen)
        most_bytes = max(map(sum, sizes), default=0)
        # A state is fetched while another is stored, so each counts one copy.
        copy_s = max((sum(host_copy_time_s(one, device) for one in of) for of in sizes), default=0)
        told.append(
            f"{_TOLD} {len(chosen)} of {len(offloadable(request.graph))} states, "
            f"{format_bytes(most_bytes)} of a rank, are in the memory of its host; copies take "
            f"{format_seconds(copy_s)} a step in each direction"
        )
        what = {"states": len(chosen), "bytes_per_rank": most_bytes, "copy_s": copy_s}
        report["offload"] = what
    else:
        report.pop("offload", None)
    if told or "explanation" in report:
        report["explanation"] = told
    return replace(strategy, storage=storage, report=report)


def offloaded_states(strategy: Strategy) -> frozenset[str]:
    """Return the states that a strategy has in the memory of the host."""
    return frozenset(name for name, one in strategy.storage.items() if one.offloaded)


def sizes_by_stage(
    graph: LogicalGraph, strategy: Strategy, names: Collection[str]
) -> list[list[int]]:
    """Return the bytes of each of some states on a rank, grouped by the stage of the state."""
    found: list[list[int]] = [[] for _ in strategy.stages]
    for name in names:
        one = strategy.storage[name]
        mesh_shape = strategy.stages[one.stage].mesh_shape
        found[one.stage].append(local_bytes(graph.tensor(name), one.sbp, mesh_shape))
    return found


def by_parameter(graph: LogicalGraph) -> list[list[str]]:
    """Return the states that can be offloaded, grouped by their parameter."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name in offloadable(graph):
        owners[owner_of(name)].append(name)
    return list(owners.values())
