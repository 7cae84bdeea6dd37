"""The planners `dlplacer` and `stanza`: parts of the model on separate ranks.

    dlplacer    each group of operators (`op_groups`) on one position of the first mesh axis, or on
                2, 4, ... or all of them, which share its samples
    stanza      the positions in two parts, n - k and k, each with at least one group; the fastest k
                is taken. In a network with convolutions first and large matrices last, the matrices
                are on one rank, so their gradients do not travel

The integer program of `placement_program` decides. It uses times of the cost model on one device
for the samples of the rank with most of them, router prices for transfers and sums of gradients,
and bytes of states and activations. Neighbours in a chain on the same ranks are one stage. The plan
with the shortest simulated step that fits is taken. Its candidates are the results of the program,
a placement by list schedule and, with `dlplacer`, everything on all positions.

    dlplacer    rank 0      stem, left ........ join, head
                rank 1            right .......

    stanza      ranks 0-2   conv, conv, conv              (samples in three parts)
                rank 3                        matrices    (all samples)

Inside a place, samples are split over its ranks and parameters are replicated.

Source: Pal et al., "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training",
IEEE Micro 39 (2019); Wu et al., "Stanza: Layer Separation for Distributed Training in Deep
Learning", 2018, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sbp_core.cost import boxing_time_s, fastest_route
from sbp_core.errors import ConfigError, MemoryLimitError, PlanError
from sbp_core.graph import TensorType
from sbp_core.infer import PIPE_AXIS, PinValue, infer_placed
from sbp_core.placement import Placement
from sbp_core.planning import (
    Compilation,
    Compiled,
    PlanContext,
    PlanRequest,
    SearchedPlanner,
    limit_key,
)
from sbp_core.sbp import B, NdSbp, P, S
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.op_groups import OpGroups, op_groups, stages_on
from sbp_planner.pipelines import samples_of_micro_batch
from sbp_planner.placement_program import (
    PlacedFlow,
    PlacementProblem,
    PlacementSolution,
    greedy_placement,
    solve_placement,
    step_of,
)
from sbp_planner.search_configs import DlplacerConfig, StanzaConfig

#: Data parallelism inside a place.
_PINS: Mapping[str, PinValue] = {
    "batch": "S(0)",
    "use:batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
}

#: With more places for groups than this, the program is slow.
_MOST_PLACES = 16

#: Copies of a parameter's bytes: parameter, gradient and two states of Adam, the states only if
#: they are not in host memory. A guess, which the compiled plan corrects.
_COPIES, _COPIES_OFFLOADED = 4, 2


def nested_ranges(num: int) -> list[tuple[int, int]]:
    """Return ranges of positions, each within one of the next larger size, and last all of them.

    If there are too many ranges, small sizes above the smallest are left out.

    >>> nested_ranges(4)
    [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (2, 4), (0, 4)]

    Args:
        num: Number of positions.
    """
    sizes, size = [1], 1
    while size < num:
        size *= next(n for n in range(2, num // size + 1) if num // size % n == 0)
        sizes.append(size)
    while len(sizes) > 2 and sum(num // size for size in sizes) > _MOST_PLACES:
        del sizes[1]
    return [(at, at + size) for size in sizes for at in range(0, num, size)]


@dataclass(frozen=True, slots=True)
class DlplacerPlanner(SearchedPlanner):
    """Places groups of operators on single positions, or on several or all of them."""

    config: DlplacerConfig

    keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the fastest placement that fits.

        Raises:
            ConfigError: the mesh has an axis of stages, or a pin is invalid.
            PlanError: no placement is known that fits.
        """
        placer = _Placer(request=context.request, planner="dlplacer", config=self.config)
        # More ranks than samples cannot share them.
        ranges = [
            positions
            for positions in nested_ranges(placer.num_positions)
            if positions[1] - positions[0] == 1
            or placer.placement(positions).size <= placer.num_samples
        ]
        problem = placer.problem(ranges, is_symmetric=True)
        solved = placer.solved(problem)
        chosen = [solved.chosen] if solved is not None else []
        chosen += [found] if (found := greedy_placement(problem)) is not None else []
        everywhere = (len(ranges) - 1,) * problem.num_groups
        for one in dict.fromkeys([*chosen, everywhere, (0,) * problem.num_groups]):
            placer.look_at(ranges, problem, one, solved)
        return placer.result()


@dataclass(frozen=True, slots=True)
class StanzaPlanner(SearchedPlanner):
    """Places groups of operators on two parts of the ranks."""

    config: StanzaConfig

    keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the fastest separation that fits.

        Raises:
            ConfigError: the mesh has an axis of stages, or fewer than two positions, or not more
                than `num_fc_workers`; or a pin is invalid.
            PlanError: the model has one group, or no separation is known that fits.
        """
        placer = _Placer(request=context.request, planner="stanza", config=self.config)
        num, axis = placer.num_positions, context.request.mesh.axes[0]
        few = self.config.num_fc_workers
        if num < 2 or (few is not None and few >= num):
            raise ConfigError(
                f"planner.num_fc_workers={few} of {num} positions on the axis {axis!r}",
                where="planner stanza",
                accepted=f"at least 2 positions, and num_fc_workers <= {max(num - 1, 1)}",
                todo="take more ranks (cluster.mesh), or another planner",
            )
        if len(placer.groups.groups) < 2:
            raise PlanError(
                "the forward pass has one group of operators, which cannot be separated",
                accepted="a model with modules for its parts",
            )
        for count in [few] if few is not None else range(1, num // 2 + 1):
            ranges = [(0, num - count), (num - count, num)]
            problem = placer.problem(ranges, uses_all=True)
            solved = placer.solved(problem)
            if solved is not None:
                placer.look_at(ranges, problem, solved.chosen, solved)
        return placer.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A placement that was compiled.

    Args:
        ranges: Positions of each place.
        chosen: Place of each group.
        model_s: Time of a step by the model of the integer program, in seconds.
        bound_s: No placement takes less, by that model.
        compiled: The compiled strategy.
    """

    ranges: Sequence[tuple[int, int]]
    chosen: tuple[int, ...]
    model_s: float
    bound_s: float
    compiled: Compiled


@dataclass(kw_only=True)
class _Placer:
    """The common part of both planners.

    Args:
        request: The request to plan.
        planner: Name of the planner.
        config: The settings of the planner.
    """

    request: PlanRequest
    planner: str
    config: DlplacerConfig | StanzaConfig
    found: list[_Found] = field(default_factory=list)
    #: Prices of boxing by type and layouts, because equal values cost the same.
    _prices: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        axes = self.request.mesh.axes
        if PIPE_AXIS in axes:
            raise ConfigError(
                f"{self.planner} makes stages of its own, and the mesh has the axis {PIPE_AXIS!r}",
                where=f"planner {self.planner}",
                accepted="a mesh whose first axis has the positions that groups are placed on",
                todo=f"say cluster.mesh=[{self.request.mesh.size}] cluster.axes=[data]",
            )
        if self.request.graph.num_updates > 1:
            raise ConfigError(
                f"{self.planner} places steps of one update, and this one has "
                f"{self.request.graph.num_updates}",
                where=f"planner {self.planner}",
                todo="set trainer.loss=whole_batch",
            )

    @property
    def num_positions(self) -> int:
        return self.request.mesh.mesh_shape[0]

    @cached_property
    def num_samples(self) -> int:
        """Samples of a micro-batch."""
        return samples_of_micro_batch(self.request.graph)

    def share(self, num_ranks: int) -> float:
        """Return the part of a micro-batch that the rank with most of it has."""
        return -(-self.num_samples // num_ranks) / self.num_samples

    @property
    def limit_bytes(self) -> float:
        return self.config.memory_bytes or self.request.cluster.device.memory_bytes

    @cached_property
    def groups(self) -> OpGroups:
        return op_groups(self.request.graph, self.request.cluster, self.config.max_groups)

    @cached_property
    def compilation(self) -> Compilation:
        quiet = replace(self.request, progress=None, family=None)
        return Compilation(request=quiet, limit_bytes=self.limit_bytes)

    def placement(self, positions: tuple[int, int]) -> Placement:
        """Return a range of positions of the first axis, as a mesh."""
        mesh = self.request.mesh
        rows = mesh.ranks
        assert not isinstance(rows, int), "a mesh has at least one axis"
        return Placement(rows[slice(*positions)], mesh.axes, mesh.device)

    def problem(
        self,
        ranges: Sequence[tuple[int, int]],
        *,
        uses_all: bool = False,
        is_symmetric: bool = False,
    ) -> PlacementProblem:
        """Return the problem of placing the groups on ranges of positions."""
        meshes = [self.placement(positions) for positions in ranges]
        groups, graph = self.groups, self.request.graph
        updated = graph.new_states
        kept = _COPIES_OFFLOADED if self.request.offloaded else _COPIES
        copies = kept if updated else 1
        shares = [self.share(mesh.size) for mesh in meshes]
        in_flight = graph.num_micro_batches
        return PlacementProblem(
            options=tuple(frozenset(mesh.rank_list) for mesh in meshes),
            forward_s=tuple(tuple(g.forward_s * one for one in shares) for g in groups.groups),
            backward_s=tuple(tuple(g.backward_s * one for one in shares) for g in groups.groups),
            update_s=tuple(
                tuple(g.update_s + self._sum_s(g.parameter_bytes, mesh) for mesh in meshes)
                for g in groups.groups
            ),
            memory_bytes=tuple(
                tuple(
                    copies * g.parameter_bytes + int(in_flight * g.activation_bytes * one)
                    for one in shares
                )
                for g in groups.groups
            ),
            flows=tuple(
                PlacedFlow(
                    producer=flow.producer,
                    consumer=flow.consumer,
                    delay_s=tuple(
                        tuple(
                            sum(self._moved_s(tensor, here, there) for tensor in flow.tensors)
                            for there in meshes
                        )
                        for here in meshes
                    ),
                )
                for flow in groups.flows
            ),
            limit_bytes=self.limit_bytes,
            micro_batches=in_flight,
            uses_all=uses_all,
            is_symmetric=is_symmetric,
        )

    def solved(self, problem: PlacementProblem) -> PlacementSolution | None:
        if self.request.progress:
            self.request.progress(f"placing {problem.num_groups} groups of operators", 0.3)
        return solve_placement(problem, self.config.time_limit_s, self.config.gap)

    def _sum_s(self, size_bytes: int, mesh: Placement) -> float:
        """Return the time in which the gradients of a group are summed over its ranks."""
        if mesh.size == 1 or not size_bytes:
            return 0.0
        tensor = TensorType((max(size_bytes // 4, 1),), "float32")
        whole = NdSbp(*(B for _ in mesh.axes))
        return self._price(tensor, (mesh, NdSbp(*(P("sum") for _ in mesh.axes))), (mesh, whole))

    def _moved_s(self, tensor: TensorType, here: Placement, there: Placement) -> float:
        """Return the time to move a value from one place to another."""
        if here == there:
            return 0.0
        entry = S(0) if tensor.shape and tensor.shape[0] >= max(here.size, there.size) else B
        sbp = NdSbp(*(entry for _ in here.axes))
        return self._price(tensor, (here, sbp), (there, sbp))

    def _price(
        self, tensor: TensorType, here: tuple[Placement, NdSbp], there: tuple[Placement, NdSbp]
    ) -> float:
        key = tensor.shape, tensor.dtype, here, there
        if key not in self._prices:
            found = fastest_route(tensor.shape, tensor.dtype, here, there, self.request.cluster)
            self._prices[key] = boxing_time_s(found, self.request.cluster)
        return self._prices[key]

    def look_at(
        self,
        ranges: Sequence[tuple[int, int]],
        problem: PlacementProblem,
        chosen: tuple[int, ...],
        solved: PlacementSolution | None,
    ) -> None:
        """Compile a placement, with the better of the two usual quotas."""
        stages = stages_on(self.groups, chosen)
        placements = tuple(self.placement(ranges[option]) for option, _ in stages)
        stage_of = {
            node: number
            for number, (_, members) in enumerate(stages)
            for group in members
            for node in self.groups.groups[group].nodes
        }
        count, num = self.request.graph.num_micro_batches, len(stages)
        made = infer_placed(
            replace(self.request, progress=None),
            planner=self.planner,
            placements=placements,
            stage_of=stage_of,
            pins=_PINS,
            in_flight=(count if num > 1 else 1,) * num,
        )
        quotas = {made.in_flight, tuple(min(num - stage, count) for stage in range(num))}
        plans = [
            self.compilation.compiled(replace(made, in_flight=quota), exact=True)
            for quota in sorted(quotas)
        ]
        best = min(plans, key=Compiled.rank)
        is_solved = solved is not None and chosen == solved.chosen
        self.found.append(
            _Found(
                ranges=ranges,
                chosen=chosen,
                model_s=solved.step_s if solved and is_solved else step_of(problem, chosen),
                bound_s=solved.bound_s if solved else 0.0,
                compiled=best,
            )
        )

    def result(self) -> Strategy:
        """Return the best placement that was tried.

        Raises:
            PlanError: nothing fits.
        """
        if not self.found:
            raise MemoryLimitError(
                f"no placement of {len(self.groups.groups)} groups fits the "
                f"{format_bytes(self.limit_bytes)} of a rank, by what they hold of parameters and "
                "activations",
                where=f"planner {self.planner}",
                accepted=f"more {limit_key(self.config.memory_bytes)}",
                todo="take more ranks, or trainer.micro_batches",
            )
        best = min(self.found, key=lambda one: one.compiled.rank())
        if not best.compiled.fits:
            raise MemoryLimitError(
                f"no placement that was compiled fits the {format_bytes(self.limit_bytes)} of a "
                f"rank: the least needs {format_bytes(best.compiled.memory_bytes)}",
                where=f"planner {self.planner}",
                accepted=f"{limit_key(self.config.memory_bytes)} >= "
                f"{best.compiled.memory_bytes:.0f}",
                todo="take more ranks, or trainer.micro_batches",
            )
        strategy = best.compiled.strategy
        return replace(strategy, report={**strategy.report, **self._report(best)})

    def _report(self, best: _Found) -> dict[str, Any]:
        places: dict[str, list[str]] = {}
        mesh = self.request.mesh
        for group, option in zip(self.groups.groups, best.chosen, strict=True):
            ranks = self.placement(best.ranges[option]).rank_list
            places.setdefault(", ".join(map(str, ranks)), []).append(group.name)
        lines = [
            f"{self.planner}: {_counted(len(self.groups.groups), 'group')} of operators on "
            f"{_counted(mesh.mesh_shape[0], 'position')} of {mesh.axes[0]!r}: {best.compiled}"
        ]
        lines += [
            f"  rank{'s' * (',' in ranks)} {ranks}: {_listed(names)}"
            for ranks, names in places.items()
        ]
        gap = max(best.model_s - best.bound_s, 0.0) / best.model_s if best.model_s else 0.0
        lines.append(
            f"  by times of groups alone {format_seconds(best.model_s)}; no placement takes less "
            f"than {format_seconds(best.bound_s)} (gap {gap:.2%})"
        )
        others = [one for one in self.found if one is not best]
        lines += [f"  instead, {self._words(one)}: {one.compiled}" for one in others]
        return {
            "places": [{"ranks": ranks, "groups": names} for ranks, names in places.items()],
            "placement_s": best.model_s,
            "bound_s": best.bound_s,
            "explanation": lines,
        }

    def _words(self, one: _Found) -> str:
        sizes: dict[tuple[int, int], int] = {}
        for option in one.chosen:
            sizes[one.ranges[option]] = sizes.get(one.ranges[option], 0) + 1
        return ", ".join(
            f"{_counted(count, 'group')} on positions {begin}-{end - 1}"
            if end > begin + 1
            else f"{_counted(count, 'group')} on position {begin}"
            for (begin, end), count in sorted(sizes.items())
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:4])}, ..., {names[-1]}"
