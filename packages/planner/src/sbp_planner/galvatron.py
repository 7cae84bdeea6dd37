"""The planner `galvatron`: cuts pipeline stages, and chooses how to parallelise each layer.

    for each number of micro-batches m that there may be, and each number of stages p
        cut the layers into p stages of ranks / p ranks, and choose a way w_l for each layer:
            minimise    (m - 1) max_s t_s + sum_s t_s                                          [s]
                        t_s = sum of layers (c_l(w_l) + x_l(w_l, w_l+1)) / m, or a transfer
            such that   sum of layers u_l(w_l, n_s) + the largest transient <= the limit       [B]
    take the best whose compiled plan fits

A *way* parallelises a layer: samples split, states sharded, matrices split, or products of these
(`layer_search`). c is the time of a layer under a way, x the time to convert to the way of the next
layer, u the memory with n micro-batches in flight. Inside a stage this is a chain under a memory
limit (`layer_wise`); over the stages it is `sbp_planner.stages.table`. Layers are the blocks of the
model.

Unlike the original, stages have equal times rather than equal numbers of layers; the time is that
of the pipeline and not a sum; the split inside a layer follows from its operators; and the memory
is corrected by the compiled plan.

Complexity: joint searches x different layers x ways; then, for each stage that may be in the best
pipeline, layers x ways^2 x granules.

Source: Miao et al., "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic
Parallelism", VLDB 2022, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from time import monotonic

from sbp_core.errors import ConfigError, SbpError
from sbp_core.graph_variant import GraphFamily, GraphVariant
from sbp_core.infer import PIPE_AXIS, resolve_pins
from sbp_core.placement import Placement
from sbp_core.planning import (
    Compiled,
    PlanContext,
    PlanRequest,
    SearchedPlanner,
    limit_key,
    requests_of,
)
from sbp_core.strategy import Strategy
from sbp_core.units import format_seconds
from sbp_planner.alpa import too_few_blocks
from sbp_planner.layer_search import AXES
from sbp_planner.layer_wise import LayerWise, on_each
from sbp_planner.model_blocks import model_blocks
from sbp_planner.pipelines import pipe_positions
from sbp_planner.search_configs import GalvatronConfig
from sbp_planner.segments import StepSegments, grouped, merged
from sbp_planner.stage_search import StageSearch, StageSettings
from sbp_planner.submeshes import pipe_first

#: How many pairs of (number of stages, number of micro-batches) are listed.
_NUM_SHOWN = 6


@dataclass(frozen=True, slots=True)
class GalvatronPlanner(SearchedPlanner):
    """Plans the stages, and a way for each layer."""

    config: GalvatronConfig

    chooses_variants = keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the best plan that was found and fits.

        Raises:
            ConfigError: the mesh has several axes apart from `pipe`, or a pin is invalid.
            PlanError: the model has no separate blocks, or nothing that was found fits.
        """
        request = replace(context.request, mesh=pipe_first(context.request.mesh))
        ends = monotonic() + context.time_limit_s
        searches = [
            (search, variant)
            for asked, variant in requests_of(request, _with_count)
            for search in self._searches(asked, ends)
        ]
        found: list[tuple[float, int]] = []
        for number, (search, _) in enumerate(searches):
            if request.progress:
                request.progress("choosing a way for each layer", number / len(searches))
            if (plan := search.roomiest()) is not None:
                found.append((plan.plan.objective_s, number))
            if monotonic() > ends and found:
                break
        best: Compiled | None = None
        best_s, failure = inf, None
        for objective_s, number in sorted(found):
            if objective_s >= best_s:
                break
            search, variant = searches[number]
            try:
                fits = search.run()
            except SbpError as error:
                failure = failure or error
                continue
            if fits.strategy.report["objective_s"] < best_s:
                best_s = fits.strategy.report["objective_s"]
                best = replace(fits, strategy=replace(fits.strategy, variant=variant))
        if best is None:
            # The error names the limit that no plan keeps.
            raise failure or _refusal(searches[0][0])
        others = [objective_s for objective_s, _ in found]
        return _told(best.strategy, [searches[number][0] for _, number in found], others)

    def _searches(self, request: PlanRequest, ends: float) -> Iterator[StageSearch]:
        """Yield the search for each number of stages."""
        mesh, config = request.mesh, self.config
        wanted = pipe_positions(request)
        _check_one_axis(mesh)
        blocks = model_blocks(request.graph, request.cluster)
        if wanted is not None and len(blocks.modules) < wanted:
            raise too_few_blocks(blocks, wanted)
        groups = grouped(blocks, max(config.max_layers, wanted or 0))
        segments = StepSegments(
            graph=request.graph,
            groups=groups,
            pins=resolve_pins(request.graph, AXES, on_each(request.pins, AXES)),
            cluster=request.cluster,
            bucket_bytes=request.options.bucket_bytes if request.options else None,
            offloaded=request.offloaded,
        )
        degrees = [p for p in range(1, len(groups) + 1) if mesh.size % p == 0]
        several = request.graph.num_updates > 1
        for degree in degrees if wanted is None else [wanted]:
            size = mesh.size // degree
            yield StageSearch(
                replace(request, pins=on_each(request.pins, ("*",))),
                segments,
                merged(blocks.graph, groups),
                LayerWise(segments=segments, mesh=mesh, devices=size, pins=request.pins),
                StageSettings(
                    planner="galvatron",
                    schedule="pipedream" if several else "1f1b",
                    limit_bytes=config.memory_bytes or request.cluster.device.memory_bytes,
                    limit_key=limit_key(config.memory_bytes),
                    ends=ends,
                    sizes=(size,),
                    num_stages=degree,
                ),
            )


def _refusal(search: StageSearch) -> SbpError:
    """Return the error of a search that finds nothing that fits."""
    try:
        search.run()
    except SbpError as error:
        return error
    raise AssertionError("nothing fitted before, and now something does")


def _with_count(family: GraphFamily, count: int) -> tuple[GraphVariant, ...]:
    return (replace(family.variant, num_micro_batches=count),)


def _check_one_axis(mesh: Placement) -> None:
    """Refuse a mesh of several axes apart from `pipe`: this planner factors the ranks of a stage.

    Raises:
        ConfigError: the mesh has several.
    """
    named = zip(mesh.axes, mesh.mesh_shape, strict=True)
    split = {axis: size for axis, size in named if axis != PIPE_AXIS and size > 1}
    if len(split) > 1:
        stages = mesh.size // prod(split.values())
        raise ConfigError(
            f"galvatron divides the ranks of a stage itself, and the mesh has the axes "
            f"{', '.join(mesh.axes)}",
            accepted=f"one axis in addition to {PIPE_AXIS!r}",
            todo=f"set cluster.mesh=[{stages},{prod(split.values())}] "
            f"cluster.axes=[{PIPE_AXIS},data]",
        )


def _told(
    strategy: Strategy, searches: Sequence[StageSearch], objectives: Sequence[float]
) -> Strategy:
    """Return a strategy whose report lists all numbers of stages and micro-batches tried."""
    lines = list(strategy.report["explanation"])
    tried = sorted(
        (objective_s, search.settings.num_stages, search.count)
        for search, objective_s in zip(searches, objectives, strict=True)
    )
    shown = [f"{stages} x {count}: {format_seconds(s)}" for s, stages, count in tried[:_NUM_SHOWN]]
    words = ", ".join(shown) + ", ..." * (len(tried) > len(shown))
    lines.append(f"  stages x micro-batches that were looked at: {words}")
    named = [
        {"stages": stages, "micro_batches": count, "objective_s": seconds}
        for seconds, stages, count in tried
    ]
    report = {**strategy.report, "tried": named, "explanation": lines}
    return replace(strategy, report=report)
