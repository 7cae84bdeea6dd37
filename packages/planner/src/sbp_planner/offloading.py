"""States in the memory of the host: by the patterns of a setting, or as many as it takes to fit.

    choose      offloaded, states that only the optimizer uses, all of one parameter together
    such that   exact memory of each rank of the compiled plan <= limit              [B]
                exact memory of its host <= the rank's share of that                 [B]

Each costs two copies over the link to the host in every step, latency and bytes; the most bytes for
a second of copies come off the device by the largest. So the parameters with the largest states go
first, and the fewest of these that fit are searched by halves, as more of them need less of the
device, but for copies on their way. Its time is that of the compiled plan, in which copies go on
beside compute.

Source: Ren et al., "ZeRO-Offload", USENIX ATC 2021, section 4 (which states to offload).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from sbp_core.compile import offloadable, owner_of
from sbp_core.cost import host_copy_time_s, local_bytes
from sbp_core.errors import ConfigError, nearest
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.plugins import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.compiled import Compilation, Compiled

#: Stands for all states of the optimizer, as in pins.
ALL_STATES = "optimizer_states"


def offloading(request: PlanRequest, strategy: Strategy, patterns: Sequence[str]) -> Strategy:
    """Return a strategy with the states of some patterns in the memory of the host.

    Args:
        request: What is planned.
        strategy: For its graph.
        patterns: Of names of states; `optimizer_states` for all of them that can be.

    Raises:
        ConfigError: a pattern names no state; the devices have no host memory beside their own.
    """
    if not patterns:
        return strategy
    names: dict[str, None] = {}
    for pattern in patterns:
        names |= dict.fromkeys(_meant(request.graph, pattern))
    if request.cluster.device.host_memory_bytes is None:
        raise ConfigError(
            f"planner.offload={list(patterns)}, and the devices of cluster "
            f"{request.cluster.name!r} have no memory of a host beside their own",
            accepted="a cluster whose devices have host_memory_bytes and host_link, such as "
            "cluster=a100 and other profiles of GPUs",
            todo="set planner.offload=[], or cluster.host_memory_bytes with cluster=local, or give "
            "these two in the cluster file",
        )
    return _with(strategy, names, request)


def _meant(graph: LogicalGraph, pattern: str) -> list[str]:
    """Return the states that a pattern names.

    Raises:
        ConfigError: there is none.
    """
    can = offloadable(graph)
    if pattern == ALL_STATES:
        found = [n for n in can if graph.input_kinds[n].kind is InputKind.OPTIMIZER_STATE]
    else:
        # What only looks as though it could be is refused where it stands in the strategy.
        states = [e.name for e in graph.inputs if e.kind.is_state and graph.is_tensor(e.name)]
        found = [name for name in states if fnmatchcase(name, pattern)]
    if not found:
        near = nearest(pattern, (ALL_STATES, *can))
        raise ConfigError(
            f"planner.offload: {pattern!r} names no state that can be offloaded",
            accepted=f"{ALL_STATES}, or patterns of states that only the optimizer uses, such as "
            f"{can[0]!r}"
            if can
            else "none: this optimizer keeps no tensors",
            todo=f"did you mean {near!r}?" if near else "",
        )
    return found


def _with(strategy: Strategy, names: Collection[str], request: PlanRequest) -> Strategy:
    """Return a strategy with some states offloaded, and with what this comes to in its report."""
    chosen = set(names)
    storage = {
        name: replace(one, offloaded=True) if name in chosen else one
        for name, one in strategy.storage.items()
    }
    device = request.cluster.device
    sizes = _sizes_by_stage(request.graph, strategy, chosen)
    most_bytes = max(map(sum, sizes), default=0)
    # Each is fetched and, at the same time as others are, stored.
    copy_s = max((sum(host_copy_time_s(one, device) for one in of) for of in sizes), default=0.0)
    told = (
        f"offloaded: {len(chosen)} states, {format_bytes(most_bytes)} of a rank, lie in the memory "
        f"of its host; copies take {format_seconds(copy_s)} a step in each direction"
    )
    report = {
        **strategy.report,
        "offload": {"states": len(chosen), "bytes_per_rank": most_bytes, "copy_s": copy_s},
        "explanation": [*strategy.report.get("explanation", ()), told],
    }
    return replace(strategy, storage=storage, report=report)


def until_it_fits(compilation: Compilation, strategy: Strategy) -> Compiled | None:
    """Return a strategy with the fewest of its largest states offloaded so that it fits.

    Returns:
        None if it does not fit with as many as the host has memory for either, or nothing can be
        offloaded.

    Raises:
        PlanError: it cannot be compiled.
    """
    request = compilation.request
    if request.cluster.device.host_memory_bytes is None:
        return None
    order = _largest_first(request.graph, strategy)
    held = [0] * len(strategy.stages)
    most = 0
    for names in order:
        for stage, sizes in enumerate(_sizes_by_stage(request.graph, strategy, names)):
            held[stage] += sum(sizes)
        most += max(held) <= compilation.host_limit_bytes
    if not most:
        return None

    def tried(count: int) -> Compiled:
        names = [name for names in order[:count] for name in names]
        return compilation.compiled(_with(strategy, names, request), exact=True)

    least, best = 0, tried(most)
    if not best.fits:
        return None
    while most - least > 1:
        middle = (least + most) // 2
        found = tried(middle)
        if found.fits:
            most, best = middle, found
        else:
            least = middle
    return best


def _sizes_by_stage(
    graph: LogicalGraph, strategy: Strategy, names: Collection[str]
) -> list[list[int]]:
    """Return the bytes of a rank of each of some states, by the stage that they are on."""
    found: list[list[int]] = [[] for _ in strategy.stages]
    for name in names:
        one = strategy.storage[name]
        mesh_shape = strategy.stages[one.stage].mesh_shape
        found[one.stage].append(local_bytes(graph.tensor(name), one.sbp, mesh_shape))
    return found


def _largest_first(graph: LogicalGraph, strategy: Strategy) -> list[list[str]]:
    """Return the states that can be offloaded, those of one parameter together, by their bytes."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name in offloadable(graph):
        owners[owner_of(name)].append(name)

    def size(owner: str) -> int:
        return sum(map(sum, _sizes_by_stage(graph, strategy, owners[owner])))

    return [owners[one] for one in sorted(owners, key=lambda owner: -size(owner))]
