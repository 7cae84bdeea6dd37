"""The planner `alpa`: cuts a model into pipeline stages, and splits the operators of each stage.

    for each segment of blocks and each submesh of the machine
        intra-op    the joint search on each logical mesh of the submesh            8, 4 x 2, 2 x 4
    inter-op        the segments and submeshes that minimise
                    (m - 1) max_s t_s + sum_s t_s                                               [s]

A segment is a range of blocks of the model. `segment_search` decides how the operators of a stage
are split. t_s is the time of stage s for one micro-batch, or of the transfer to the next stage. The
time of a stage is serial: operators, boxing inside, and its share of the gradients and the update.
Inside a stage, equal layers get equal decisions and are posed once, as in `ilp`. If there are very
many conversions to price, the search looks only at signatures near the choice axis by axis. Equal
segments on ranks with the same links are solved once. The inter-op program is the exact one of
`sbp_planner.stages.table`. It prices only stages that may be in the best pipeline; the paper prices
all. The stages of `pipedream` are priced first, so no plan is slower by this objective than theirs.

A model of very many blocks is cut only between groups of about equal work (`max_blocks`), as the
paper clusters operators into layers.

Complexity: joint searches x (blocks^2 / 2 x submeshes x logical shapes at most, usually a few
dozen), or `time_limit_s`. At least one pipeline is priced, with one logical mesh for each stage.

Source: Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep
Learning", OSDI 2022, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic

from sbp_core.errors import PlanError
from sbp_core.infer import PIPE_AXIS, FixedDecisions, resolve_pins
from sbp_core.placement import Placement
from sbp_core.planning import PlanContext, PlanRequest, SearchedPlanner, limit_key
from sbp_core.strategy import Strategy
from sbp_planner.meshes import is_bound
from sbp_planner.model_blocks import ModelBlocks, machine_levels, model_blocks
from sbp_planner.pipelines import pipe_positions
from sbp_planner.search_configs import AlpaConfig
from sbp_planner.segment_search import SegmentProgram, SegmentSearch
from sbp_planner.segments import StepSegments, grouped, merged
from sbp_planner.stage_search import (
    StageAsked,
    StageMeshes,
    StageProgram,
    StageSearch,
    StageSettings,
    on_axes,
)
from sbp_planner.stages import FlushedProblem, InFlightLimits, cut_flushed
from sbp_planner.submeshes import (
    StageRanks,
    logical_shapes,
    pipe_first,
    stage_axes,
    stage_ranks,
    submesh_sizes,
)

#: How many searches are kept: those for the logical meshes of one or two stages.
_NUM_KEPT = 12


@dataclass(frozen=True, slots=True)
class AlpaPlanner(SearchedPlanner):
    """Plans the stages, and how each stage is split inside."""

    config: AlpaConfig

    keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the best stages that were found and fit.

        Raises:
            ConfigError: the mesh has several axes and none is `pipe`, or a pin is invalid.
            PlanError: the model has no separate blocks, or nothing that was found fits.
        """
        request = replace(context.request, mesh=pipe_first(context.request.mesh))
        config, mesh = self.config, request.mesh
        ends = monotonic() + context.time_limit_s
        num_stages = pipe_positions(request)
        blocks = model_blocks(request.graph, request.cluster)
        if num_stages is not None and len(blocks.modules) < num_stages:
            raise too_few_blocks(blocks, num_stages)
        groups = grouped(blocks, max(config.max_blocks, num_stages or 0))
        graph = merged(blocks.graph, groups)
        axes = stage_axes(mesh)
        segments = StepSegments(
            graph=request.graph,
            groups=groups,
            pins=resolve_pins(request.graph, axes, request.pins),
            cluster=request.cluster,
            bucket_bytes=request.options.bucket_bytes if request.options else None,
            offloaded=request.offloaded,
        )
        solver = IntraOperator(
            segments=segments,
            mesh=mesh,
            axes=axes,
            keeps_axes=is_bound(request.pins, mesh),
            ends=ends,
        )
        if num_stages is None:
            sizes = submesh_sizes(request.cluster, mesh.size)
        else:
            sizes = (mesh.size // num_stages,)
        several = request.graph.num_updates > 1
        search = StageSearch(
            request,
            segments,
            graph,
            solver,
            StageSettings(
                planner="alpa",
                schedule="pipedream" if several else "1f1b",
                limit_bytes=config.memory_bytes or request.cluster.device.memory_bytes,
                limit_key=limit_key(config.memory_bytes),
                ends=ends,
                sizes=sizes,
                num_stages=num_stages,
                first=(_pipedream(request, graph_of=blocks, groups=groups, count=num_stages),),
                gap=config.gap,
            ),
        )
        return search.run().strategy


def too_few_blocks(blocks: ModelBlocks, num_stages: int) -> PlanError:
    """Return the error for a model that has fewer blocks than stages."""
    return PlanError(
        f"the forward pass has {len(blocks.modules)} blocks for {num_stages} stages",
        accepted="at least one block for each stage",
        todo="use fewer ranks, or an axis 'pipe' of fewer positions",
    )


def _pipedream(
    request: PlanRequest,
    *,
    graph_of: ModelBlocks,
    groups: tuple[tuple[str, ...], ...],
    count: int | None,
) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Return the stages of the planner `pipedream` for groups of blocks, as (modules, ranks)."""
    each = None if count is None else (request.mesh.size // count,)
    plan = cut_flushed(
        FlushedProblem(
            graph=merged(graph_of.graph, groups),
            levels=machine_levels(request.cluster, request.mesh.size),
            micro_batches=request.graph.num_micro_batches,
            in_flight=InFlightLimits.STAGES,
            device_counts=each,
            num_stages=count,
        )
    )
    if plan is None:
        return ()
    return tuple(
        (tuple(name for group in stage.blocks for name in groups[int(group)]), stage.devices)
        for stage in plan.stages
    )


@dataclass(slots=True, kw_only=True, eq=False)
class IntraOperator:
    """Solves segments on the logical meshes of submeshes. Equal segments are solved once.

    Args:
        segments: The segments of the step.
        mesh: The mesh of all ranks.
        axes: Names of the mesh axes of every stage.
        keeps_axes: Whether pins name the axes, so that none may be left out.
        ends: The time of `time.monotonic` after which no new logical mesh is tried, in s.
    """

    segments: StepSegments
    mesh: Placement
    axes: tuple[str, ...]
    keeps_axes: bool = False
    ends: float = inf
    _free: dict[Hashable, tuple[SegmentProgram, tuple[int, ...]] | None] = field(
        default_factory=dict
    )
    _within: dict[Hashable, SegmentProgram | None] = field(default_factory=dict)
    #: The first ranks of each class of equal links stand for all of them, so prices are shared.
    _alike: dict[Hashable, StageRanks] = field(default_factory=dict)
    #: The last searches: a search without a limit is often followed by one within memory.
    _searches: dict[Hashable, SegmentSearch] = field(default_factory=dict)

    def least_s(self, blocks: frozenset[int], devices: int) -> float:
        """Return the work of blocks, divided equally among the devices, in seconds of a step."""
        return sum(self.segments.least_s(block, devices) for block in blocks)

    def free_s(self, stage: StageAsked) -> float:
        """Return the time of the fastest program, in seconds of a step; infinite without one."""
        found = (self.free(stage, shape) for shape in self._looked_at(stage))
        return min((one[0].cost_s for one in found if one is not None), default=inf)

    def program(self, stage: StageAsked) -> StageProgram:
        """Return the fastest program, on any logical mesh, that holds no more than the limit."""
        best: SegmentProgram | None = None
        for shape in self._looked_at(stage):
            free = self.free(stage, shape)
            # Under a memory limit, a program is no faster than without one.
            if free is None or (best is not None and best.cost_s <= free[0].cost_s):
                continue
            found = self.within(stage, shape)
            if found is not None and (best is None or found.cost_s < best.cost_s):
                best = found
        if best is None:
            return StageProgram(cost_s=inf)
        return StageProgram(
            cost_s=best.cost_s,
            memory_bytes=best.memory_bytes(stage.in_flight),
            mesh_shape=best.mesh_shape,
            kept=best.kept(self.segments.segment(stage.blocks)),
        )

    def meshes(self, programs: Sequence[StageProgram]) -> StageMeshes:
        """Return the programs on the mesh axes along which some stage has several ranks."""
        shapes, number = [program.mesh_shape for program in programs], len(self.axes)
        split = [at for at in range(number) if any(shape[at] > 1 for shape in shapes)] or [0]
        if self.keeps_axes:
            split = list(range(number))
        return StageMeshes(
            axes=tuple(self.axes[at] for at in split),
            shapes=tuple(tuple(shape[at] for at in split) for shape in shapes),
            parts=tuple(on_axes(program.kept or FixedDecisions(), split) for program in programs),
        )

    def shapes(self, devices: int) -> Iterator[tuple[int, ...]]:
        """Yield the logical meshes of a stage; with an axis `pipe`, the other axes of the mesh."""
        if PIPE_AXIS in self.mesh.axes:
            named = zip(self.mesh.axes, self.mesh.mesh_shape, strict=True)
            yield tuple(n for axis, n in named if axis != PIPE_AXIS) or (1,)
        else:
            yield from logical_shapes(devices)

    def _looked_at(self, stage: StageAsked) -> Iterator[tuple[int, ...]]:
        """Yield the logical meshes to try for a stage; out of time, the first and known ones."""
        for number, shape in enumerate(self.shapes(stage.devices)):
            if not number or monotonic() < self.ends or self._key(stage, shape) in self._free:
                yield shape

    def free(
        self, stage: StageAsked, shape: tuple[int, ...]
    ) -> tuple[SegmentProgram, tuple[int, ...]] | None:
        """Return the fastest program on a logical mesh; None if the pins allow none."""
        key = self._key(stage, shape)
        if key not in self._free:
            try:
                self._free[key] = self._search(stage, shape).free()
            except PlanError:
                self._free[key] = None
        return self._free[key]

    def within(self, stage: StageAsked, shape: tuple[int, ...]) -> SegmentProgram | None:
        """Return a program that holds no more than the limit; None if none was found."""
        free = self.free(stage, shape)
        if free is None or free[0].memory_bytes(stage.in_flight) <= stage.limit_bytes:
            return None if free is None else free[0]
        if stage.devices == 1:
            return None
        key = (*self._key(stage, shape), stage.in_flight, stage.limit_bytes)
        if key not in self._within:
            search = self._search(stage, shape)
            self._within[key] = search.within(stage.limit_bytes, stage.in_flight, free[1])
        return self._within[key]

    def _search(self, stage: StageAsked, shape: tuple[int, ...]) -> SegmentSearch:
        key = self._key(stage, shape)
        found = self._searches.pop(key, None)
        if found is None:
            segment = self.segments.segment(stage.blocks)
            found = SegmentSearch(self.segments, segment, self._alike[key[1]])
        self._searches[key] = found
        if len(self._searches) > _NUM_KEPT:
            del self._searches[next(iter(self._searches))]
        return found

    def _key(self, stage: StageAsked, shape: tuple[int, ...]) -> tuple[Hashable, Hashable]:
        ranks = stage_ranks(self.mesh, stage.start, shape, self.axes)
        alike = ranks.link_class(self.segments.cluster)
        self._alike.setdefault(alike, ranks)
        return self.segments.segment(stage.blocks).key, alike
