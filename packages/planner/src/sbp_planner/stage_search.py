"""Cut a model into pipeline stages, and choose how each stage splits its tensors on its ranks.

    minimise    (m - 1) max_s t_s + sum_s t_s    m micro-batches, t_s of stages and transfers   [s]
    such that   each stage holds its micro-batches in flight; the compiled plan fits a rank     [B]

A `StageSolver` prices the few stages that may be in the best pipeline
(`sbp_planner.stages.cut_lazily`); the planners `alpa` and `galvatron` have different ones. The
memory that it counts is corrected by the compiled plan, and the model is cut again, until one fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import inf, isfinite
from time import monotonic
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sbp_core.errors import MemoryLimitError
from sbp_core.infer import PIPE_AXIS, FixedDecisions, Pipelined, pipelined, resolve_pins
from sbp_core.planning import Compilation, Compiled, LimitSearch, PlanRequest, search_limits
from sbp_core.sbp import NdSbp
from sbp_core.strategy import Signature, Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.assemble import assembled
from sbp_planner.model_blocks import machine_levels
from sbp_planner.segments import StepSegments
from sbp_planner.stages import (
    BlockGraph,
    InFlightLimits,
    LazyPlan,
    PricedStage,
    TableProblem,
    TableStage,
    cut_lazily,
    order_ideals,
    transfer_s,
)
from sbp_planner.submeshes import is_submesh, submesh

Floats = NDArray[np.float64]

#: How many limits of counted memory are tried, each with a plan compiled.
_MAX_TRIES = 8

#: The factor from a limit under which nothing fits to the next one: more memory may be counted than
#: is held.
_GROWTH = 1.25

#: Limits that differ by less than this share of the limit are treated as equal.
_RESOLUTION = 0.02

#: How many places to cut are considered.
_MAX_PLACES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAsked:
    """A stage to be priced.

    Args:
        blocks: Numbers of its blocks.
        start: Number of ranks before it.
        devices: Number of its ranks.
        in_flight: Number of micro-batches that it holds.
        limit_bytes: Memory of a rank, as the solver counts it.
    """

    blocks: frozenset[int]
    start: int
    devices: int
    in_flight: int
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageProgram:
    """The split of a stage, and its cost.

    Args:
        cost_s: Seconds of a step; infinite if nothing fits.
        memory_bytes: Bytes that the fullest rank holds, as the solver counts them.
        mesh_shape: Shape of the mesh of its ranks.
        kept: Its signatures and storages, on the axes of the solver.
        words: A remark for people.
    """

    cost_s: float
    memory_bytes: int = 0
    mesh_shape: tuple[int, ...] = ()
    kept: FixedDecisions | None = None
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeshes:
    """The stages of a plan on their meshes.

    Args:
        axes: Names of the mesh axes of every stage.
        shapes: Mesh shape of each stage.
        parts: The decisions of each stage on these axes.
    """

    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[FixedDecisions, ...]


class StageSolver(Protocol):
    """Finds the programs of stages."""

    def least_s(self, blocks: frozenset[int], devices: int) -> float:
        """Return a lower bound on the time of a stage, in seconds of a step."""
        ...

    def free_s(self, stage: StageAsked) -> float:
        """Return the time of a stage whatever memory it takes, in seconds of a step."""
        ...

    def program(self, stage: StageAsked) -> StageProgram:
        """Return the best program within the limit."""
        ...

    def meshes(self, programs: Sequence[StageProgram]) -> StageMeshes:
        """Return the programs of all stages of a plan on meshes of the same axes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """The settings of a search for stages.

    Args:
        planner: Name of the planner, for the strategy.
        schedule: Schedule of the pipeline: `1f1b`, or `pipedream` if a step has several updates.
        limit_bytes: Memory of a rank.
        limit_key: The setting that is the limit.
        ends: Time of `time.monotonic` at which the search for better stages ends, in s.
        sizes: Allowed numbers of ranks of a stage.
        num_stages: Required number of stages; None for any number.
        first: Stages that are priced first: for each its modules and its number of ranks.
        gap: Relative distance to the bound at which the search ends.
    """

    planner: str
    schedule: str
    limit_bytes: float
    limit_key: str
    ends: float
    sizes: tuple[int, ...]
    num_stages: int | None = None
    first: tuple[tuple[tuple[tuple[str, ...], int], ...], ...] = ()
    gap: float = 0.0


#: Stages, and the program of each stage.
_Cut: TypeAlias = tuple[LazyPlan, list[StageProgram]]


class StageSearch:
    """The search for the stages of one request.

    Args:
        request: The request to plan.
        segments: The segments of its step.
        graph: The graph of the blocks of the segments.
        solver: Finds the programs of stages.
        settings: The settings of the search.
    """

    def __init__(
        self,
        request: PlanRequest,
        segments: StepSegments,
        graph: BlockGraph,
        solver: StageSolver,
        settings: StageSettings,
    ) -> None:
        self.request, self.segments, self.solver = request, segments, solver
        self.settings = settings
        self.ideals = order_ideals(graph, _MAX_PLACES)
        self.levels = machine_levels(request.cluster, request.mesh.size)
        self.count = request.graph.num_micro_batches
        quiet = replace(request, progress=None, family=None)
        self.compilation = Compilation(request=quiet, limit_bytes=settings.limit_bytes)

    def run(self) -> Compiled:
        """Return the best strategy that fits, compiled.

        Raises:
            PlanError: nothing that was found fits; names what was found.
        """
        limit_bytes, least = self.settings.limit_bytes, inf
        best: Compiled | None = None

        def choose(wanted: float) -> _Cut | None:
            self._say("cutting the model into stages", 1 - search.tries / _MAX_TRIES)
            found = self.cut(wanted)
            return None if found is None else (found, self.programs(found, wanted))

        def compiled() -> list[float]:
            nonlocal best, least
            assert search.asked is not None, "it is compiled because it was chosen"
            found = self.compilation.compiled(self.strategy(*search.asked))
            if found.fits:
                best, search.tries = found, 0  # the first that fits is taken
            least = min(least, found.memory_bytes)
            return [found.memory_bytes]

        search = LimitSearch(
            limit_bytes=limit_bytes,
            choose=choose,
            counted=lambda cut: max(program.memory_bytes for program in cut[1]),
            wanted=limit_bytes,
            resolution_bytes=_RESOLUTION * limit_bytes,
            tries=_MAX_TRIES,
        )
        search_limits([search], compiled)
        if best is None:
            raise self._nothing_fits(least)
        return best

    def _nothing_fits(self, least_bytes: float) -> MemoryLimitError:
        settings, some = self.settings, isfinite(least_bytes)
        needs = f"the least needs {format_bytes(least_bytes)}" if some else "there are none at all"
        key = settings.limit_key
        return MemoryLimitError(
            f"no stages that were found fit the {format_bytes(settings.limit_bytes)} of a rank: "
            f"{needs}",
            where=f"planner {settings.planner}",
            accepted=f"{key} >= {least_bytes:.0f}" if some else f"more {key}",
            todo="raise trainer.micro_batches, recompute (compile.passes.recompute), take more "
            "ranks, or raise planner.time_limit_s",
        )

    def roomiest(self) -> LazyPlan | None:
        """Return the best stages within the limit, or within the first larger limit with any."""
        wanted = self.settings.limit_bytes
        for _ in range(_MAX_TRIES):
            found = self.cut(wanted)
            if found is not None:
                return found
            wanted *= _GROWTH
        return None

    def cut(self, limit_bytes: float) -> LazyPlan | None:
        """Return the best stages within a counted limit."""
        return cut_lazily(
            self.problem(limit_bytes),
            partial(self._price, limit_bytes),
            first=[stages for one in self.settings.first if (stages := self._as_stages(one))],
            is_out_of_time=lambda: monotonic() > self.settings.ends,
            gap=self.settings.gap,
        )

    def problem(self, limit_bytes: float) -> TableProblem:
        """Return the problem of `table`, with lower bounds as prices."""
        ideals, settings = self.ideals, self.settings
        size, places = self.request.mesh.size, len(ideals.masks)
        num_blocks = len(self.segments.groups)
        states = [self.segments.state_bytes(block) for block in range(num_blocks)]
        members = np.array(
            [[mask >> block & 1 for block in range(num_blocks)] for mask in ideals.masks]
        )
        inside = np.where(ideals.below, 0.0, inf)

        def between(of_block: Sequence[float]) -> Floats:
            sums: Floats = members @ np.asarray(of_block, dtype=np.float64)
            found: Floats = inside + (sums[None, :] - sums[:, None])
            return found

        @cache
        def least(own: int) -> Floats:
            one = [self.solver.least_s(frozenset((at,)), own) for at in range(num_blocks)]
            return between(one) / self.count

        def seconds(own: int, behind: int) -> Floats:
            ranks = self._ranks(size - own - behind, own)
            if settings.num_stages is None and not self._is_allowed(ranks):
                return np.full((places, places), inf)
            return least(own)

        def held(own: int, behind: int, _: int) -> Floats:
            return np.where(between(states) / own <= limit_bytes, seconds(own, behind), inf)

        return TableProblem(
            num_places=places,
            devices=size,
            seconds=seconds,
            held_seconds=held,
            device_counts=settings.sizes,
            transfer_s=partial(transfer_s, self.levels, ideals),
            in_flight=InFlightLimits.STAGES,
            micro_batches=self.count,
            num_stages=settings.num_stages,
        )

    def _is_allowed(self, ranks: tuple[int, ...]) -> bool:
        """Return whether a stage may have these ranks: a submesh, all, or a size of `first`."""
        size = self.request.mesh.size
        if len(ranks) not in self.settings.sizes or len(ranks) == size:
            return True
        return is_submesh(self.request.cluster, ranks)

    def _ranks(self, start: int, devices: int) -> tuple[int, ...]:
        return self.request.mesh.rank_list[start : start + devices]

    def _blocks(self, stage: TableStage) -> frozenset[int]:
        inside = self.ideals.masks[stage.stop] & ~self.ideals.masks[stage.start]
        return frozenset(at for at in range(len(self.segments.groups)) if inside >> at & 1)

    def _asked(
        self, stage: TableStage, behind: int, in_flight: int, limit_bytes: float
    ) -> StageAsked:
        return StageAsked(
            blocks=self._blocks(stage),
            start=self.request.mesh.size - behind - stage.devices,
            devices=stage.devices,
            in_flight=in_flight,
            limit_bytes=limit_bytes,
        )

    def _price(
        self, limit_bytes: float, stage: TableStage, behind: int, in_flight: int
    ) -> PricedStage:
        asked = self._asked(stage, behind, in_flight, limit_bytes)
        program = self.solver.program(asked)
        free_s = self.solver.free_s(asked)
        return PricedStage(free_s=free_s / self.count, held_s=program.cost_s / self.count)

    def _as_stages(self, wanted: Sequence[tuple[tuple[str, ...], int]]) -> tuple[TableStage, ...]:
        """Return wanted modules as stages between places to cut; empty if there are no such."""
        number = {name: at for at, group in enumerate(self.segments.groups) for name in group}
        place = {mask: at for at, mask in enumerate(self.ideals.masks)}
        done, found = 0, []
        for modules, devices in wanted:
            mask = done
            for name in modules:
                mask |= 1 << number[name]
            if mask not in place or mask == done:
                return ()
            found.append(TableStage(start=place[done], stop=place[mask], devices=devices))
            done = mask
        return tuple(found)

    def programs(self, found: LazyPlan, limit_bytes: float) -> list[StageProgram]:
        """Return the program of each stage."""
        stages, behind, programs = found.plan.stages, self.request.mesh.size, []
        for at, stage in enumerate(stages):
            behind -= stage.devices
            in_flight = min(len(stages) - at, self.count)
            programs.append(self.solver.program(self._asked(stage, behind, in_flight, limit_bytes)))
        return programs

    def modules(self, found: LazyPlan) -> list[tuple[str, ...]]:
        """Return the modules of each stage."""
        return [
            tuple(name for at in sorted(self._blocks(stage)) for name in self.segments.groups[at])
            for stage in found.plan.stages
        ]

    def strategy(self, found: LazyPlan, programs: Sequence[StageProgram]) -> Strategy:
        """Return the strategy of stages and their programs."""
        request, settings = self.request, self.settings
        mesh = request.mesh
        sizes = tuple(stage.devices for stage in found.plan.stages)
        has_axis = PIPE_AXIS in mesh.axes
        stages = pipelined(
            mesh,
            settings.schedule,
            self.count,
            stage_ranks=() if has_axis or len(sizes) == 1 else sizes,
            num_updates=request.graph.num_updates,
        )
        on = self.solver.meshes(programs)
        starts = accumulate(sizes, initial=0)
        placements = tuple(
            submesh(mesh, start, shape, on.axes)
            for start, shape in zip(starts, on.shapes, strict=False)
        )
        return assembled(
            replace(request, progress=None),
            replace(stages, stages=placements),
            self.modules(found),
            on.parts,
            resolve_pins(request.graph, on.axes, request.pins),
            planner=settings.planner,
            report=self.report(found, programs, stages),
        )

    def report(
        self, found: LazyPlan, programs: Sequence[StageProgram], stages: Pipelined
    ) -> dict[str, Any]:
        """Return the result, for people and for programs."""
        plan, planner = found.plan, self.settings.planner
        gap = 1 - found.bound_s / plan.objective_s if plan.objective_s > 0 else 0.0
        none = "no stages of these blocks take" if gap < 1e-6 else "the bound is"
        number = len(plan.stages)
        lines = [
            f"{planner}: {number} stage{'s' * (number > 1)} by {self.settings.schedule}, "
            f"{format_seconds(plan.objective_s)} a step without overlap inside stages; {none} "
            f"{'less' if gap < 1e-6 else format_seconds(found.bound_s)} (gap {gap:.2%}, "
            f"{found.num_priced} stages priced)"
        ]
        entries = []
        modules = self.modules(found)
        for at, (names, stage, program) in enumerate(
            zip(modules, plan.stages, programs, strict=True)
        ):
            named = names[0] + (f" ... {names[-1]}" if len(names) > 1 else "")
            shape = " x ".join(map(str, program.mesh_shape))
            ranks = f"{stage.devices} ranks as {shape}" if stage.devices > 1 else "1 rank"
            takes = f"{format_seconds(program.cost_s / self.count)} a micro-batch"
            more = f", {program.words}" if program.words else ""
            lines.append(f"  stage {at}: {ranks}, {named}: {takes}{more}")
            entries.append(
                {
                    "ranks": stage.devices,
                    "mesh": list(program.mesh_shape),
                    "blocks": list(names),
                    "compute_s": program.cost_s / self.count,
                }
            )
        return {
            "stages": entries,
            "pipeline": stages.name,
            "objective_s": plan.objective_s,
            "bound_s": found.bound_s,
            "explanation": lines,
        }

    def _say(self, what: str, fraction: float) -> None:
        if self.request.progress is not None:
            self.request.progress(what, fraction)


def on_axes(kept: FixedDecisions, axes: Sequence[int]) -> FixedDecisions:
    """Return decisions on other mesh axes: for each of them, the axis whose entries it copies."""

    def on(sbp: NdSbp) -> NdSbp:
        return NdSbp(*(sbp[axis] for axis in axes))

    return FixedDecisions(
        nodes={
            name: Signature(tuple(map(on, of.inputs)), tuple(map(on, of.outputs)))
            for name, of in kept.nodes.items()
        },
        storage={name: on(sbp) for name, sbp in kept.storage.items()},
    )
