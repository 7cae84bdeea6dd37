"""The planner `osdp`: each parameter replicated (DP) or sharded (ZDP), fastest that fits.

With N ranks on one mesh axis, α and 1/β latency and bandwidth of its slowest link, S bytes of a
parameter, M micro-batches in a step (the paper has one):

    communication    DP    2 (N-1) (α + β S/N)         all-reduce of the gradient         [s]
                     ZDP   (2M+1) (N-1) (α + β S/N)    for each micro-batch gather and gather
                                                       again, once reduce-scatter
    model states     DP    parameter + gradient + optimizer states (4 S for AdamW)        [B]
                     ZDP   the same of the first rank's shard of dim 0, ceil(n / N) of n rows
    transient        ZDP   2 S while it is used: the gathered parameter and its gradient
    step             compute + sum of communication
    memory           activations + buffers + sum of states + largest transient  <=  limit

The choice is exact (`knapsack`). It becomes pins on parameters, states, gradients and updates; the
batch is split; the rest is inferred. The model leaves out what the paper's does, such as the new
values of states beside the old ones, so the plan is compiled and its memory predicted exactly
(`sbp_core.memory`; without a tensor library the model's number stands); where that exceeds the
limit, the choice is made again under a limit that is lower by as much. Holds the model.

Source: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI
2023, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from sbp_core.cluster import Cluster
from sbp_core.compile import PhysicalPlan, compile_plan
from sbp_core.errors import ConfigError, PlanError, SbpLookupError
from sbp_core.graph import GraphInput, InputKind, LogicalGraph, Phase
from sbp_core.infer import PinValue, infer_strategy
from sbp_core.memory import predict
from sbp_core.placement import Placement
from sbp_core.plugins import PlanRequest
from sbp_core.sbp import split_bounds
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.configs import OsdpConfig
from sbp_planner.knapsack import KnapsackItem, KnapsackSolution, choose, evaluate

DP, ZDP = "B", "S(0)"

#: Choices that are compiled before the planner gives up; each is under a lower limit.
MAX_TRIES = 16


@dataclass(frozen=True, slots=True)
class OsdpPlanner:
    """Plans data parallelism, sharding what has to be sharded."""

    config: OsdpConfig

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the fastest strategy whose compiled plan fits the memory.

        Raises:
            ConfigError: the mesh has no such axis, or splits over other axes too.
            PlanError: no choice fits; names the limit and what sharding everything needs.
        """
        model = asked = self.model(request)
        everything = evaluate(model.items, [True] * len(model.items), model.fixed_bytes)
        for last in [False] * MAX_TRIES + [True]:
            choice = None if last else asked.solve()
            choice = everything if choice is None else choice
            chosen = dict(zip(model.names, choice.sharded, strict=True))
            strategy = _infer(request, self.config.axis, chosen, {})
            needed = _needed_bytes(compile_plan(request.graph, strategy), choice)
            if needed <= model.limit_bytes:
                report = {
                    "osdp": model.report(choice) | {"plan_memory_bytes_per_rank": needed},
                    "explanation": model.explain(choice, needed),
                }
                return replace(strategy, report={**strategy.report, **report})
            if all(choice.sharded):
                break
            lower = choice.memory_bytes - max(1.0, needed - model.limit_bytes)
            asked = replace(model, limit_bytes=lower)
        raise PlanError(
            f"no choice fits {model.limit_bytes:.0f} B on a rank: with all {len(model.items)} "
            f"parameters sharded the plan needs {needed} B",
            where="planner osdp",
            accepted=f"memory_bytes >= {needed}",
            todo="raise planner.memory_bytes, use more ranks, or make micro-batches smaller",
        )

    def model(self, request: PlanRequest) -> OsdpModel:
        """Return the problem of a request.

        Raises:
            ConfigError: the mesh has no such axis, or splits over other axes too.
        """
        axis = _only_axis(request.mesh, self.config.axis)
        names = shardable(request.graph)
        replicated = _infer(request, self.config.axis, dict.fromkeys(names, False), {})
        stage = replicated.report["predicted_by_stage"][0]
        micro, once = stage["micro_compute_s"], stage["step_compute_s"]
        return OsdpModel(
            names=names,
            items=parameter_items(request.graph, names, request.mesh, axis, request.cluster),
            compute_s=request.graph.num_micro_batches * micro + once,
            activations_bytes=replicated.in_flight[0] * stage["activations_bytes"],
            buffers_bytes=_unsharded_bytes(request.graph, names),
            limit_bytes=self.config.memory_bytes or request.cluster.device.memory_bytes,
        )


def _needed_bytes(plan: PhysicalPlan, choice: KnapsackSolution) -> int:
    """Return what the rank needs that needs most: exactly, with a tensor library installed."""
    try:
        return predict(plan).peak
    except SbpLookupError:
        return ceil(choice.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OsdpModel:
    """The problem of one graph, in the terms of the paper.

    Args:
        names: The parameters that may be sharded.
        items: What each costs, aligned with `names`.
        compute_s: Time of all ops of a step on one rank, batch split.
        activations_bytes: What forward passes leave for backward passes.
        buffers_bytes: States that cannot be sharded.
        limit_bytes: Memory of one rank.
    """

    names: tuple[str, ...]
    items: tuple[KnapsackItem, ...]
    compute_s: float
    activations_bytes: int
    buffers_bytes: int
    limit_bytes: float

    @property
    def fixed_bytes(self) -> int:
        """Memory that does not depend on the choice."""
        return self.activations_bytes + self.buffers_bytes

    def solve(self) -> KnapsackSolution | None:
        """Return the fastest choice that fits the limit, exactly; None if none does."""
        return choose(self.items, self.limit_bytes, self.fixed_bytes)

    def report(self, choice: KnapsackSolution) -> dict[str, Any]:
        """Return what was chosen and what it was chosen among, as plain values."""
        num = len(self.items)
        all_dp = evaluate(self.items, [False] * num, self.fixed_bytes)
        all_zdp = evaluate(self.items, [True] * num, self.fixed_bytes)
        return {
            "limit_bytes": self.limit_bytes,
            "binds": self._binding(choice, all_dp),
            "chosen": self._entry(choice),
            "all_dp": self._entry(all_dp),
            "all_zdp": self._entry(all_zdp),
            "compute_s": self.compute_s,
            "activations_bytes": self.activations_bytes,
            "buffers_bytes": self.buffers_bytes,
            "transient_bytes": choice.transient_bytes,
            "modes": {
                name: "ZDP" if sharded else "DP"
                for name, sharded in zip(self.names, choice.sharded, strict=True)
            },
        }

    def explain(self, choice: KnapsackSolution, needed_bytes: int) -> list[str]:
        """Return what was chosen and why, as lines for people."""
        num = len(self.items)
        lines = [
            f"osdp: {sum(choice.sharded)} of {num} parameters sharded, under a limit of "
            f"{format_bytes(self.limit_bytes)} a rank; the compiled plan needs "
            f"{format_bytes(needed_bytes)}"
        ]
        for name, entry in (
            ("all replicated", evaluate(self.items, [False] * num, self.fixed_bytes)),
            ("chosen", choice),
            ("all sharded", evaluate(self.items, [True] * num, self.fixed_bytes)),
        ):
            seconds, size = self.compute_s + entry.seconds, entry.memory_bytes
            lines.append(f"  {name}: {format_seconds(seconds)} a step, {format_bytes(size)}")
        return lines

    def _entry(self, choice: KnapsackSolution) -> dict[str, Any]:
        return {
            "predicted_step_s": self.compute_s + choice.seconds,
            "predicted_memory_bytes_per_rank": choice.memory_bytes,
            "num_sharded": sum(choice.sharded),
            "fits": choice.memory_bytes <= self.limit_bytes,
        }

    def _binding(self, choice: KnapsackSolution, all_dp: KnapsackSolution) -> str:
        if not any(choice.sharded):
            return "communication time: replicating everything is fastest, and fits"
        short = all_dp.memory_bytes - self.limit_bytes
        return f"memory: replicating everything needs {short:.0f} B more than the limit"


def _only_axis(mesh: Placement, name: str) -> int:
    sizes = dict(zip(mesh.axes, mesh.mesh_shape, strict=True))
    others = [axis for axis, size in sizes.items() if axis != name and size > 1]
    if name not in sizes or others:
        raise ConfigError(
            f"osdp splits over the mesh axis {name!r} alone, and the mesh is {sizes}",
            where="planner osdp",
            accepted=f"a mesh with the axis {name!r}, and no other of more than one rank",
            todo="set planner.axis, or cluster.mesh and its axes",
        )
    return mesh.axes.index(name)


def shardable(graph: LogicalGraph) -> tuple[str, ...]:
    """Return the parameters that have a dim 0 to shard."""
    return tuple(
        entry.name
        for entry in graph.inputs
        if entry.kind is InputKind.PARAMETER and graph.tensor(entry.name).shape
    )


def _states_of(graph: LogicalGraph, name: str) -> list[GraphInput]:
    """Return the optimizer states of a parameter that have its shape."""
    shape = graph.tensor(name).shape
    return [
        entry
        for entry in graph.inputs
        if entry.of == name
        and graph.is_tensor(entry.name)
        and graph.tensor(entry.name).shape == shape
    ]


def parameter_items(
    graph: LogicalGraph, names: Sequence[str], mesh: Placement, axis: int, cluster: Cluster
) -> tuple[KnapsackItem, ...]:
    """Return what each parameter costs either way."""
    link = cluster.link(mesh.group(mesh.rank_list[0], axis))
    α, β, N = link.latency_s, 1 / link.bytes_per_s, mesh.mesh_shape[axis]  # noqa: N806
    M = graph.num_micro_batches  # noqa: N806
    found = []
    for name in names:
        tensor = graph.tensor(name)
        S, rows = tensor.size_bytes, tensor.shape[0]  # noqa: N806 (letters of the model)
        kept = [graph.tensor(entry.name).size_bytes for entry in _states_of(graph, name)]
        whole = S + sum(kept) + (S if name in graph.new_states else 0)
        found.append(
            KnapsackItem(
                transient_bytes=2 * S,
                dp_bytes=whole,
                zdp_bytes=whole // max(rows, 1) * split_bounds(rows, N, 0)[1],
                dp_s=2 * (N - 1) * (α + β * S / N),
                zdp_s=(2 * M + 1) * (N - 1) * (α + β * S / N),
            )
        )
    return tuple(found)


def _unsharded_bytes(graph: LogicalGraph, names: Sequence[str]) -> int:
    """Return the bytes of the states that are none of `names` and follow none of them."""
    sharded = {*names, *(entry.name for name in names for entry in _states_of(graph, name))}
    return sum(
        graph.tensor(entry.name).size_bytes
        for entry in graph.inputs
        if entry.kind.is_state and graph.is_tensor(entry.name) and entry.name not in sharded
    )


def _infer(
    request: PlanRequest, axis: str, sharded: Mapping[str, bool], report: Mapping[str, Any]
) -> Strategy:
    """Return the strategy in which the chosen parameters are sharded on the axis."""
    graph = request.graph
    pins: dict[str, PinValue] = {
        "batch": {axis: "S(0)"},
        "use:batch": {axis: "S(0)"},
        "activations": {axis: "S(0)"},
        "parameters": {axis: DP},
        "optimizer_states": {axis: DP},
        "gradients": {axis: DP},
        "updates": {axis: DP},
    }
    owned = update_values(graph)
    for name, yes in sharded.items():
        if yes:
            states = [entry.name for entry in _states_of(graph, name)]
            for tensor in (name, *states, *owned.get(name, ())):
                pins[tensor] = {axis: ZDP}
    return infer_strategy(request, planner="osdp", pins=pins, report=report)


def update_values(graph: LogicalGraph) -> dict[str, list[str]]:
    """Return, for each parameter, the values of its shape that its update alone uses or makes.

    An optimizer node belongs to the parameter whose states it reads, directly or through others.
    """
    owner: dict[str, str] = {}
    for entry in graph.inputs:
        if entry.kind is InputKind.PARAMETER:
            owner[entry.name] = entry.name
        elif entry.kind is InputKind.OPTIMIZER_STATE:
            owner[entry.name] = entry.of
    found: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        if node.phase is not Phase.OPTIMIZER or node.is_host:
            continue
        used = graph.tensor_inputs(node)
        owners = {owner[value] for value in used if value in owner}
        if len(owners) != 1:
            continue
        name = owners.pop()
        for value in node.outputs:
            owner[value] = name
        for value in (*used, *node.outputs):
            inner = value not in graph.input_kinds and owner.get(value, name) == name
            if inner and graph.tensor(value).shape == graph.tensor(name).shape:
                found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def build(config: OsdpConfig) -> OsdpPlanner:
    """Make the planner."""
    return OsdpPlanner(config)
