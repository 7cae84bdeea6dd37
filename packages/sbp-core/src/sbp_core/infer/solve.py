"""Infer a strategy from the shardings of a few tensors (pins): choose all others at least cost.

Planners call `infer_strategy`.

Mesh axes are decided one after the other, the outermost first, each exactly where possible (`axis`,
`minsum`). This decomposition is legal because an n-D signature is legal iff its entries are legal
on every axis and the axes do not clash; later axes take earlier ones into account. The result is
not always the n-D optimum, because an early axis does not foresee a later one. `joint_problem`
poses all axes at once, for planners that search them jointly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sbp_core.errors import ConfigError, SignatureError
from sbp_core.graph.serialize import graph_hash
from sbp_core.infer.axis import decide_axis
from sbp_core.infer.equal_layers import EqualLayers, find_equal_layers
from sbp_core.infer.pins import PIPE_AXIS, Pins, PinValue, resolve_pins
from sbp_core.infer.predict import predict_cost
from sbp_core.infer.problem import StepProblem
from sbp_core.infer.stages import StagePatterns, assign_stages
from sbp_core.infer.work import Decision, SharedTables, StepWork
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.signatures.axes import conflict
from sbp_core.strategy import Assignment, Signature, Storage, Strategy

if TYPE_CHECKING:
    from sbp_core.cluster import Cluster
    from sbp_core.plan_request import PlanRequest


def infer_strategy(
    request: PlanRequest,
    *,
    planner: str,
    pins: Mapping[str, PinValue] | None = None,
    stages: tuple[Placement, ...] | None = None,
    stage_patterns: StagePatterns = (),
    in_flight: tuple[int, ...] | None = None,
    orders: tuple[str, ...] = (),
    staleness: tuple[int, ...] = (),
    report: Mapping[str, Any] | None = None,
) -> Strategy:
    """Return the cheapest legal strategy that keeps the pins.

    Args:
        request: Graph, mesh, cluster, and the user's pins, which override `pins`.
        planner: Name for the strategy.
        pins: The planner's own pins; see `infer.pins`.
        stages: Placement of each stage; by default the positions of the mesh axis `pipe`, or the
            whole mesh.
        stage_patterns: For each stage, patterns of module paths; empty splits evenly.
        in_flight: Quota of each stage; by default that of 1F1B, `num_stages - stage`.
        orders: Orders of the actions of ranks, as in `Strategy.orders`.
        staleness: Staleness of the parameters of each stage, as in `Strategy.staleness`.
        report: Added to the report.

    Returns:
        The strategy. Its report holds what `predict_cost` returns and, under `optimal_by_axis`,
        whether the choice on each mesh axis is proved to be the best.

    Raises:
        ConfigError: a pin or stage pattern does not apply to the graph.
        PlanError: nothing satisfies the pins or the stages.
        SignatureError: an operator has no signatures.
    """
    work, resolved = _work(request, pins, stages, stage_patterns)
    progress = request.progress or (lambda what, fraction: None)
    decision, optimal = _decided_by_axis(work, resolved, progress)
    return strategy_of(
        request,
        work,
        decision,
        planner=planner,
        in_flight=in_flight,
        orders=orders,
        staleness=staleness,
        report={"optimal_by_axis": optimal, **(report or {})},
    )


def joint_problem(
    request: PlanRequest,
    *,
    pins: Mapping[str, PinValue] | None = None,
    stages: tuple[Placement, ...] | None = None,
    stage_patterns: StagePatterns = (),
    from_axes: bool = True,
    tied: bool = False,
    tables: SharedTables | None = None,
    known: StepWork | None = None,
) -> StepProblem:
    """Return the problem of a step on all mesh axes at once.

    `strategy_of` turns the decision of any of its solutions into a strategy.

    Args:
        request: See `infer_strategy`, as for the next three.
        pins: The planner's own pins.
        stages: Placement of each stage.
        stage_patterns: For each stage, patterns of module paths.
        from_axes: Whether it starts from the solution axis by axis, which takes a while.
        tied: Whether equal layers are posed once, and decided alike.
        tables: Tables of other steps on the same cluster, such as variants of this one.
        known: The work of an earlier problem of the same request, with all its results.

    Raises:
        ConfigError: a pin or stage pattern does not apply to the graph.
        PlanError: nothing satisfies the pins or the stages.
        SignatureError: an operator has no signatures.
    """
    work, resolved = _work(request, pins, stages, stage_patterns, tables)
    work = known or work
    progress = request.progress or (lambda what, fraction: None)
    layers = find_equal_layers(work, resolved) if tied else None
    decision = Decision()
    if from_axes:
        decision, _ = _decided_by_axis(work, resolved, progress, layers)
    return StepProblem(work, decision, range(len(work.axes)), resolved, layers=layers)


def strategy_of(
    request: PlanRequest,
    work: StepWork,
    decision: Decision,
    *,
    planner: str,
    in_flight: tuple[int, ...] | None = None,
    orders: tuple[str, ...] = (),
    staleness: tuple[int, ...] = (),
    report: Mapping[str, Any] | None = None,
    is_predicted: bool = True,
) -> Strategy:
    """Return the strategy of the decisions on all axes; see `infer_strategy` for the arguments.

    Its report includes the results of `predict_cost` only if `is_predicted`: a search that compiles
    many strategies does not need them.

    Raises:
        SignatureError: the signatures of an operator clash between axes.
    """
    check_legal(work, decision)
    num_stages = len(work.placements)
    quotas = in_flight or one_forward_one_backward(num_stages, work.graph.num_micro_batches)
    strategy = replace(
        _strategy(work, decision, planner, quotas),
        regather=request.regather,
        orders=orders,
        staleness=staleness,
    )
    if not is_predicted:
        return replace(strategy, report=dict(report or {}))
    progress = request.progress or (lambda what, fraction: None)
    progress("predicting", (1 + len(work.axes)) / (2 + len(work.axes)))
    found = predict_cost(work.graph, strategy, request.cluster, request.options)
    progress("planned", 1.0)
    return replace(strategy, report={**found, **(report or {})})


def _work(
    request: PlanRequest,
    pins: Mapping[str, PinValue] | None,
    stages: tuple[Placement, ...] | None,
    stage_patterns: StagePatterns,
    tables: SharedTables | None = None,
) -> tuple[StepWork, Pins]:
    """Return a request on its stages, and the pins of the planner and the user."""
    placements = stages or stage_placements(request.mesh)
    _check_placements(placements, request.cluster)
    if request.progress:
        request.progress("assigning stages", 0.0)
    work = StepWork(
        graph=request.graph,
        placements=placements,
        stages=assign_stages(request.graph, len(placements), stage_patterns),
        cluster=request.cluster,
        bucket_bytes=None if request.options is None else request.options.bucket_bytes,
        offloaded=request.offloaded,
        tables=tables or SharedTables(),
    )
    return work, resolve_pins(request.graph, work.axes, pins or {}, request.pins)


def _decided_by_axis(
    work: StepWork,
    pins: Pins,
    progress: Callable[[str, float], None],
    layers: EqualLayers | None = None,
) -> tuple[Decision, dict[str, bool]]:
    """Decide one axis after the other; return also whether each choice is proved to be the best."""
    decision = Decision()
    optimal: dict[str, bool] = {}
    for axis, name in enumerate(work.axes):
        progress(f"inferring mesh axis {name!r}", (1 + axis) / (2 + len(work.axes)))
        optimal[name] = decide_axis(work, decision, axis, pins, layers=layers)
    return decision, optimal


def stage_placements(mesh: Placement) -> tuple[Placement, ...]:
    """Return the placement of each stage: one for each position of the axis `pipe`, if any."""
    if PIPE_AXIS not in mesh.axes:
        return (mesh,)
    axis = mesh.axes.index(PIPE_AXIS)
    return tuple(mesh.submesh(axis, index) for index in range(mesh.mesh_shape[axis]))


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the quotas of 1F1B: `num_stages - stage`, at most the number of micro-batches.

    Source: Narayanan et al., "PipeDream", SOSP 2019, section 3.2.
    """
    return tuple(min(num_stages - stage, num_micro_batches) for stage in range(num_stages))


def _check_placements(placements: Sequence[Placement], cluster: Cluster) -> None:
    first = placements[0]
    for placement in placements:
        cluster.check_ranks(placement)
        if placement.axes != first.axes:
            raise ConfigError(
                f"stages on unequal meshes: {dict(zip(first.axes, first.mesh_shape, strict=True))} "
                f"and {dict(zip(placement.axes, placement.mesh_shape, strict=True))}",
                accepted="stages with the same mesh axes, of whatever sizes",
            )


def check_legal(work: StepWork, decision: Decision) -> None:
    """Check that the entries of each node do not clash between mesh axes.

    Raises:
        SignatureError: they clash.
    """
    # Equal layers have the same signatures, which are the same objects.
    checked: dict[tuple[int, ...], str] = {}
    for node in work.nodes:
        parts, mesh_shape = decision.nodes[node.name], work.mesh_shape_of(node)
        key = (*map(id, parts), *mesh_shape)
        if key not in checked:
            checked[key] = conflict(parts, mesh_shape)
        if reason := checked[key]:
            raise SignatureError(
                f"{decision.signature(node.name)} is not legal: {reason}", where=node.where()
            )


def _strategy(
    work: StepWork, decision: Decision, planner: str, in_flight: tuple[int, ...]
) -> Strategy:
    combined: dict[tuple[int, ...], Signature] = {}

    def signature(node: str) -> Signature:
        key = tuple(map(id, decision.nodes[node]))
        if key not in combined:
            combined[key] = decision.signature(node)
        return combined[key]

    return Strategy(
        planner=planner,
        graph_hash=graph_hash(work.graph),
        stages=work.placements,
        num_micro_batches=work.graph.num_micro_batches,
        nodes={
            node.name: Assignment(
                stage=work.stages.nodes[node.name], signature=signature(node.name)
            )
            for node in work.nodes
        },
        storage={
            entry.name: Storage(
                stage=work.stages.inputs[entry.name],
                sbp=NdSbp(*decision.storage[entry.name]),
                offloaded=entry.name in work.offloaded,
            )
            for entry in work.inputs
        },
        in_flight=in_flight,
    )
