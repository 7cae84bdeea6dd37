"""The planner `osdp`: each parameter replicated (DP) or sharded (ZDP), fastest that fits.

    choose      sharded, a subset of the parameters; a variant of the step; offloaded states, if
                memory is short
    minimise    predicted time of a step, of the compiled plan                              [s]
    such that   exact memory of each rank of the compiled plan <= limit                     [B]

It works on one mesh axis, over which samples are split. Inference first decides everything else,
under `pins` and those of the user: splits on other axes, and stages of a pipeline. These decisions
stay fixed. So inside a tensor-parallel group N is the data-parallel degree, a parameter has the
bytes that the other axes leave of it, and each stage of a pipeline has a separate limit
(`sharding`).

Two strategies are made: everything replicated, everything sharded. Another choice copies, from one
of them, the decisions on each parameter and on the values that only its gradient and update depend
on. Its time is that of a replay of the compiled plan (`sbp_core.simulation`), so boxing that
overlaps with compute costs only the delay that it causes. Neither time nor memory is a sum over
parameters, so the search has three parts:

1. `guide` estimates the cost of each parameter either way, and `knapsack` solves that exactly.
   Begin with the fastest choice of the guide. Correct the guide's limit by the difference between
   the memory of the compiled plan and the limit, until the last choice that fits is next to one
   that does not (`storage_search`).
2. If memory rules out the fastest choice, do the same for other variants of the step, if they are
   left to the planner: more micro-batches, recomputation, operators in slices (`osdp_variants`).
   Go on with the fastest that fits.
3. Take any change of a single parameter, to replicated or to sharded, that is faster and fits,
   until there is none. Then exchange one or two sharded parameters for one or two others, the most
   promising by the guide first. Begin again if that is faster and fits.

Guarantees: the plan fits; it is the fastest of all that were tried, so it is no slower than
replicating everything or sharding everything, where they fit; and no change of a single parameter
both fits and is faster. Parameters that the guide cannot tell apart, such as those of equal layers,
are assumed to change the time alike (nearly true with a thread for boxing), but are tried one by
one for memory. Choices that differ in several parameters at once may be better.

If nothing fits, or the fastest choice without a limit is faster by more than a little, all of this
is repeated with optimizer states in host memory (`offload_search`): first with all of them, then
with as few of the largest as the choice needs. Their copies are in the guide and in the compared
plans, and host memory has a limit, too.

With `batch_sizes` the same is done for other numbers of samples, and samples per second are
compared. The user decides the batch: the plan is for `trainer.batch_size`, and the report says
which batch would be faster.

Without a tensor library, or if it does not know the layout of a result, the bound on memory of
`sbp_core.infer.predict_cost` replaces the exact number; the report says so.

Source: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI
2023, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic

from sbp_core.errors import ConfigError, MemoryLimitError, SbpError
from sbp_core.graph_variant import GraphFamily
from sbp_core.infer import PIPE_AXIS, pipelined, predict_cost
from sbp_core.planning import PlanContext, PlanRequest, SearchedPlanner
from sbp_core.strategy import Strategy
from sbp_planner.configs import AUTO, OsdpConfig, check_split_axis
from sbp_planner.no_fit import no_fit
from sbp_planner.osdp_report import Batch, batch_report, explanation, memory_gain, storage_report
from sbp_planner.osdp_variants import TriedVariant, VariantSearch
from sbp_planner.sharding import ShardingExtremes, ends_of
from sbp_planner.storage_search import improve

#: With `batch_sizes=auto`, how often the batch is doubled, at most.
_MAX_DOUBLINGS = 8


@dataclass(frozen=True, slots=True)
class OsdpPlanner(SearchedPlanner):
    """Plans data parallelism, and shards parameters where memory needs it or it is faster."""

    config: OsdpConfig

    chooses_variants = keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the strategy of the module's docstring.

        Raises:
            ConfigError: the mesh has no such axis, or a pin is invalid; or nothing that was tried
                fits `memory_bytes`, or the memory of the device. The message names the memory that
                the leanest choice needs, its kinds, and what would make it fit.
        """
        request = context.request
        search = self._search(request, monotonic() + context.time_limit_s)
        best = search.run()
        if request.progress:
            request.progress("choosing what to shard", 0.6)
        self._improve(best)
        batches = self._batches(request, best, search) if self.config.batch_sizes else []
        if not best.fits:
            raise self._no_fit(best, batches)
        strategy = replace(best.search.strategy(best.choice), variant=best.variant)
        graph = best.search.request.graph
        report = {
            **predict_cost(graph, strategy, request.cluster, request.options),
            "osdp": {**storage_report(best.search, best.choice, search), **batch_report(batches)},
            "explanation": explanation(best.search, best.choice, search, batches),
        }
        return replace(strategy, report=report)

    def gain(self, planned: Strategy) -> float:
        """Return the share of the step's time that the fastest choice without a limit saves."""
        return memory_gain(planned)

    @property
    def _limit_key(self) -> str:
        return f"{'planner' if self.config.memory_bytes else 'cluster'}.memory_bytes"

    def _search(self, request: PlanRequest, ends_at: float) -> VariantSearch:
        mesh = request.mesh
        axis = check_split_axis(self.config.axis, mesh.mesh_shape, mesh.axes)
        others = [
            size
            for name, size in zip(mesh.axes, mesh.mesh_shape, strict=True)
            if name not in (axis, PIPE_AXIS)
        ]

        def ends(asked: PlanRequest) -> ShardingExtremes:
            return self._ends(asked, axis)

        return VariantSearch(
            request=request,
            ends=ends,
            limit_bytes=self.config.memory_bytes or request.cluster.device.memory_bytes,
            may_split_classes=max(others, default=1) > 1,
            ends_at=ends_at,
        )

    def _ends(self, request: PlanRequest, axis: str) -> ShardingExtremes:
        config, graph = self.config, request.graph
        stages = pipelined(
            request.mesh,
            config.pipeline,
            graph.num_micro_batches,
            config.chunks,
            config.stage_ranks,
            num_updates=graph.num_updates,
        )
        if len(stages.stages) == 1:  # its micro-batches run one after the other
            stages = replace(stages, in_flight=(1,))
        return ends_of(
            request, axis, stages=stages, stage_patterns=config.stage_patterns, pins=config.pins
        )

    def _improve(self, tried: TriedVariant) -> None:
        """Change single parameters of a variant that fits, while that is faster."""
        if tried.search.best is not None:
            tried.search.best = improve(tried.search, tried.search.best)

    def _batches(
        self, request: PlanRequest, best: TriedVariant, search: VariantSearch
    ) -> list[Batch]:
        """Return the results for the requested batch, and for other batch sizes.

        Raises:
            ConfigError: the step is given for one batch size only.
        """
        family, sizes = request.family, self.config.batch_sizes
        if family is None:
            raise ConfigError(
                "planner.batch_sizes cannot be compared: this step has one batch size",
                where="planner osdp",
                accepted="planner.batch_sizes=[], or a step of sbp-plan or sbp-train",
            )
        own = _batch(family.batch_size, best)
        found = {own.batch_size: own}

        def look_at(size: int) -> Batch:
            if size not in found:
                if request.progress:
                    request.progress(f"trying a batch of {size} samples", 0.8)
                found[size] = self._other(request, family, size, search)
            return found[size]

        if sizes != AUTO:
            for size in sizes:
                look_at(int(size))
            return list(found.values())
        size = own.batch_size
        for _ in range(_MAX_DOUBLINGS):
            # Double the samples until they do not fit; or halve them until they do.
            size = 2 * size if own.fits else size // 2
            if size < 1 or look_at(size).fits != own.fits:
                break
        fitting = max((size for size, batch in found.items() if batch.fits), default=0)
        if fitting and not found.get(2 * fitting, own).fits:
            look_at(fitting + fitting // 2)
        return list(found.values())

    def _other(
        self, request: PlanRequest, family: GraphFamily, size: int, search: VariantSearch
    ) -> Batch:
        """Return the result for another batch size."""
        if monotonic() > search.ends_at:
            return Batch(batch_size=size, problem="planner.time_limit_s was up")
        try:
            other = family.with_batch(size)
            asked = replace(request, graph=other.graph(other.variant), family=other)
            best = self._search(asked, search.ends_at).run()
        except SbpError as error:
            return Batch(batch_size=size, problem=error.what)
        self._improve(best)
        return _batch(size, best)

    def _no_fit(self, best: TriedVariant, others: list[Batch]) -> MemoryLimitError:
        search, least = best.search, best.choice
        peaks = search.peaks(least)
        error = no_fit(
            search.plan(least),
            search.request.graph,
            limit_bytes=search.limit_bytes,
            least_bytes=search.memory(least),
            num_sharded=sum(least),
            memory=None if peaks is None else max(peaks.values(), key=lambda rank: rank.peak),
            limit_key=self._limit_key,
            has_slices=best.variant is not None,
        )
        fitting = [batch for batch in others if batch.fits]
        if not fitting:
            return error
        fastest = max(fitting, key=lambda batch: batch.samples_per_s)
        todo = f"trainer.batch_size={fastest.batch_size}: fits;\n    {error.todo}"
        return error.replaced(MemoryLimitError, todo=todo)


def _batch(size: int, tried: TriedVariant) -> Batch:
    return Batch(
        batch_size=size,
        step_s=tried.step_s,
        memory_bytes=tried.search.memory(tried.choice),
        fits=tried.fits,
        num_sharded=sum(tried.choice),
        variant=tried.words,
    )
