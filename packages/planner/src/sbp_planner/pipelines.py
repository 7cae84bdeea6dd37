"""The planners `gpipe` and `pipedream`: the model in stages, each micro-batch through all of them.

    minimise    (m - 1) max_s t_s + sum_s t_s        m micro-batches, t_s of stage s            [s]

t_s is the time of a stage, from the blocks of the model (`model_blocks`) and the links of the
machine: compute, synchronisation and the transfer to the next stage. `sbp_planner.stages`
(`cut_flushed`) cuts, exactly over all places where a graph of blocks can be cut.

    gpipe       one rank a stage, equal in time; all forward passes first
    pipedream   any number of ranks a stage, which share each micro-batch; 1F1B, or PipeDream's own
                asynchronous schedule if a step has several updates. A single stage is data
                parallelism, which is one of the candidates.

On a mesh with the axis `pipe`, its positions are the stages, each with the ranks of the other axes.
Inside a stage, samples are split over its ranks and parameters are replicated. t_s assumes that
ranks share a micro-batch evenly. If they cannot (2 samples on 4 ranks), the model is also cut into
stages of ranks that can, and the pipeline with the shorter simulated step is taken.

Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019, section 3.1
(partitioning with replication; here for steps that flush).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from sbp_core.errors import PlanError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.infer import PIPE_AXIS, PinValue, infer_strategy, pipelined
from sbp_core.planning import Compilation, PlanContext, PlanRequest, SearchedPlanner
from sbp_core.strategy import Strategy
from sbp_core.units import format_seconds
from sbp_planner.configs import check_stage_axes
from sbp_planner.model_blocks import machine_levels, model_blocks
from sbp_planner.search_configs import GpipeConfig, PipedreamConfig
from sbp_planner.stages import FlushedPlan, FlushedProblem, InFlightLimits, cut_flushed

#: Data parallelism inside a stage.
_PINS: Mapping[str, PinValue] = {
    "batch": "S(0)",
    "use:batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
}


@dataclass(frozen=True, slots=True)
class GpipePlanner(SearchedPlanner):
    """Plans a pipeline with stages of one rank, or one stage per position of the axis `pipe`."""

    config: GpipeConfig

    def propose(self, context: PlanContext) -> Strategy:
        """Return the balanced pipeline.

        Raises:
            ConfigError: the mesh has several axes and none is `pipe`, or a pin is invalid.
            PlanError: the model has fewer blocks than stages.
        """
        request = context.request
        num_stages = pipe_positions(request) or request.mesh.size
        return _planned(request, "gpipe", schedule="gpipe", num_stages=num_stages)


@dataclass(frozen=True, slots=True)
class PipedreamPlanner(SearchedPlanner):
    """Plans a pipeline whose stages may have several ranks."""

    config: PipedreamConfig

    def propose(self, context: PlanContext) -> Strategy:
        """Return the best pipeline.

        Raises:
            ConfigError: the mesh has several axes and none is `pipe`, or a pin is invalid.
            PlanError: the model has no separate blocks.
        """
        request = context.request
        schedule = "pipedream" if request.graph.num_updates > 1 else "1f1b"
        num_stages = pipe_positions(request)
        return _planned(request, "pipedream", schedule=schedule, num_stages=num_stages)


def pipe_positions(request: PlanRequest) -> int | None:
    """Return the number of stages along the axis `pipe`; None if there is no such axis.

    Raises:
        ConfigError: the mesh has several axes, and none is `pipe`.
    """
    mesh = request.mesh
    if PIPE_AXIS in mesh.axes:
        return mesh.mesh_shape[mesh.axes.index(PIPE_AXIS)]
    check_stage_axes(mesh.mesh_shape, mesh.axes)
    return None


def _planned(
    request: PlanRequest, planner: str, *, schedule: str, num_stages: int | None
) -> Strategy:
    graph, mesh = request.graph, request.mesh
    if request.progress:
        request.progress("cutting the model into stages", 0.0)
    blocks = model_blocks(graph, request.cluster)
    if num_stages is not None and len(blocks.modules) < num_stages:
        raise PlanError(
            f"the forward pass has {len(blocks.modules)} blocks for {num_stages} stages",
            accepted="at least one block for each stage",
            todo="use fewer ranks, or an axis 'pipe' of fewer positions",
        )
    problem = FlushedProblem(
        graph=blocks.graph,
        levels=machine_levels(request.cluster, mesh.size),
        micro_batches=graph.num_micro_batches,
        in_flight=InFlightLimits.ALL if schedule == "gpipe" else InFlightLimits.STAGES,
        device_counts=None if num_stages is None else (mesh.size // num_stages,),
        num_stages=num_stages,
    )
    plan = cut_flushed(problem)
    assert plan is not None, "without a limit of memory something fits"
    strategy = _inferred(request, planner, plan, schedule)
    num_samples = samples_of_micro_batch(graph)
    if num_stages is not None or all(num_samples % stage.devices == 0 for stage in plan.stages):
        return strategy
    shared = tuple(count for count in range(1, mesh.size + 1) if num_samples % count == 0)
    even = cut_flushed(replace(problem, device_counts=shared))
    if even is None:
        return strategy
    # Some models split samples unevenly, others not at all: the cut cannot tell these apart.
    compilation = Compilation(request=replace(request, progress=None), limit_bytes=inf)
    tried = [strategy, _inferred(request, planner, even, schedule)]
    step_s = [compilation.compiled(one).step_s for one in tried]
    best = int(step_s[1] < step_s[0])
    said = (
        f"  stages of {'any number of ranks' if best else 'ranks that share samples evenly'} "
        f"instead: {format_seconds(step_s[1 - best])} a step, and not "
        f"{format_seconds(step_s[best])}; a micro-batch has {num_samples} "
        f"sample{'s' * (num_samples > 1)}"
    )
    report = tried[best].report
    lines = [*report["explanation"], said]
    return replace(tried[best], report={**report, "explanation": lines})


def _inferred(request: PlanRequest, planner: str, plan: FlushedPlan, schedule: str) -> Strategy:
    graph, mesh = request.graph, request.mesh
    has_axis = PIPE_AXIS in mesh.axes
    sizes = tuple(stage.devices for stage in plan.stages)
    stages = pipelined(
        mesh,
        schedule,
        graph.num_micro_batches,
        stage_ranks=() if has_axis or len(sizes) == 1 else sizes,
        num_updates=graph.num_updates,
    )
    return infer_strategy(
        request,
        planner=planner,
        pins=_PINS,
        stages=stages.stages,
        # The blocks of a stage have the names of its modules.
        stage_patterns=[stage.blocks for stage in plan.stages] if len(plan.stages) > 1 else (),
        in_flight=stages.in_flight,
        orders=stages.orders,
        staleness=stages.staleness,
        report=_report(planner, plan, schedule),
    )


def samples_of_micro_batch(graph: LogicalGraph) -> int:
    """Return the least size of dim 0 of the batch inputs of a micro-batch; 1 if none has dims."""
    batch = (entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH)
    shapes = (graph.tensor(name).shape for name in batch if graph.is_tensor(name))
    return max(min((shape[0] for shape in shapes if shape), default=1), 1)


def _report(planner: str, plan: FlushedPlan, schedule: str) -> dict[str, Any]:
    lines = [
        f"{planner}: {len(plan.stages)} stage{'s' * (len(plan.stages) > 1)} by {schedule}, "
        f"{format_seconds(plan.step_s)} a step by blocks and links"
    ]
    for number, stage in enumerate(plan.stages):
        named = stage.blocks[0] + (f" ... {stage.blocks[-1]}" if len(stage.blocks) > 1 else "")
        lines.append(
            f"  stage {number}: {stage.devices} rank{'s' * (stage.devices > 1)}, {named}: "
            f"{format_seconds(stage.compute_s)} a micro-batch"
            + (f", then {format_seconds(stage.transfer_s)} to the next" if stage.transfer_s else "")
        )
    return {
        "stages": [
            {"ranks": stage.devices, "blocks": list(stage.blocks), "compute_s": stage.compute_s}
            for stage in plan.stages
        ],
        "pipeline": schedule,
        "explanation": lines,
    }
