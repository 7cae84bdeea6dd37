"""The planners `gpipe` and `pipedream`: the model in stages, each micro-batch through all of them.

    minimise    (m - 1) max_s t_s + sum_s t_s        m micro-batches, t_s of stage s            [s]

t_s is compute and synchronisation of a stage and the transfer to the next one, by the blocks of the
model (`model_blocks`) and the links of the machine (`sbp_planner.stages.cut_flushed`, exact over
where a graph of blocks can be cut).

    gpipe       one rank a stage, equal in time; all forward passes first
    pipedream   any number of ranks a stage, which share each micro-batch; 1F1B, or PipeDream's own
                asynchronous schedule if a step has several updates. A single stage is data
                parallelism, and so among the answers.

On a mesh with the axis `pipe`, its positions are the stages, each with the ranks of the other axes.
Inside a stage, samples are split over its ranks and parameters are replicated.

Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019, section 3.1
(partitioning with replication; here for steps that flush).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbp_core.errors import ConfigError, PlanError
from sbp_core.infer import PIPE_AXIS, PinValue, infer_strategy, pipelined
from sbp_core.plugins import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.units import format_seconds
from sbp_planner.model_blocks import machine_levels, model_blocks
from sbp_planner.offload_search import plan_with_offload
from sbp_planner.search_configs import GpipeConfig, PipedreamConfig
from sbp_planner.stages import FlushedPlan, FlushedProblem, InFlight, cut_flushed

#: Data parallelism inside a stage.
_PINS: Mapping[str, PinValue] = {
    "batch": "S(0)",
    "use:batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
}


@dataclass(frozen=True, slots=True)
class GpipePlanner:
    """Plans a pipeline of single ranks, or of the positions of the axis `pipe`."""

    config: GpipeConfig

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the balanced pipeline.

        Raises:
            ConfigError: the mesh has several axes and none is `pipe`, or a pin cannot be meant.
            PlanError: the model has fewer blocks than stages.
        """
        num_stages = pipe_positions(request) or request.mesh.size

        def plan(asked: PlanRequest, _: float) -> Strategy:
            return _planned(asked, "gpipe", schedule="gpipe", num_stages=num_stages)

        return plan_with_offload(request, self.config.offload, plan)


@dataclass(frozen=True, slots=True)
class PipedreamPlanner:
    """Plans a pipeline whose stages may have several ranks."""

    config: PipedreamConfig

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the best pipeline.

        Raises:
            ConfigError: the mesh has several axes and none is `pipe`, or a pin cannot be meant.
            PlanError: modules do not tell blocks apart.
        """
        several = request.graph.num_updates > 1
        schedule = "pipedream" if several else "1f1b"
        num_stages = pipe_positions(request)

        def plan(asked: PlanRequest, _: float) -> Strategy:
            return _planned(asked, "pipedream", schedule=schedule, num_stages=num_stages)

        return plan_with_offload(request, self.config.offload, plan)


def pipe_positions(request: PlanRequest) -> int | None:
    """Return the stages that the axis `pipe` says; None if there is none.

    Raises:
        ConfigError: the mesh has several axes, and none is `pipe`.
    """
    mesh = request.mesh
    if PIPE_AXIS in mesh.axes:
        return mesh.mesh_shape[mesh.axes.index(PIPE_AXIS)]
    if len(mesh.axes) > 1:
        raise ConfigError(
            f"a mesh of the axes {', '.join(mesh.axes)} does not say what its stages are",
            accepted=f"one axis, or one that is called {PIPE_AXIS!r}",
            todo=f"say cluster.mesh=[{mesh.size}] cluster.axes=[data]",
        )
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
    each = None if num_stages is None else mesh.size // num_stages
    plan = cut_flushed(
        FlushedProblem(
            graph=blocks.graph,
            levels=machine_levels(request.cluster, mesh.size),
            micro_batches=graph.num_micro_batches,
            in_flight=InFlight.ALL if schedule == "gpipe" else InFlight.STAGES,
            device_counts=None if each is None else (each,),
            num_stages=num_stages,
        )
    )
    assert plan is not None, "without a limit of memory something fits"
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


def _report(planner: str, plan: FlushedPlan, schedule: str) -> dict[str, Any]:
    lines = [
        f"{planner}: {len(plan.stages)} stage{'s' * (len(plan.stages) > 1)} by {schedule}, "
        f"{format_seconds(plan.step_s)} a step by blocks and links"
    ]
    for number, stage in enumerate(plan.stages):
        named = stage.blocks[0] + (f" ... {stage.blocks[-1]}" if len(stage.blocks) > 1 else "")
        lines.append(
            f"  stage {number}: {stage.devices} rank{'s' * (stage.devices > 1)}, {named}: "
            f"{format_seconds(stage.compute_s)} a micro-batch, then "
            f"{format_seconds(stage.transfer_s)} to the next"
        )
    return {
        "stages": [
            {"ranks": stage.devices, "blocks": list(stage.blocks), "compute_s": stage.compute_s}
            for stage in plan.stages
        ],
        "pipeline": schedule,
        "explanation": lines,
    }


def build_gpipe(config: GpipeConfig) -> GpipePlanner:
    """Make the planner `gpipe`."""
    return GpipePlanner(config)


def build_pipedream(config: PipedreamConfig) -> PipedreamPlanner:
    """Make the planner `pipedream`."""
    return PipedreamPlanner(config)
