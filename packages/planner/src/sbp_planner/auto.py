"""The planner `auto`: tries several planners on several meshes, and takes the fastest that fits.

    for each candidate, until all are tried or the time is up:
        plan, compile, simulate the step, predict its memory exactly
    take the fastest that fits the memory of a rank

A candidate is a mesh and a way to plan on it. The first candidates are cheap and usually good, on
the requested mesh (`starting_pins`). Next come the same on other meshes of the same ranks (one
axis, every product of two, stages of a pipeline if the step has micro-batches). Last come the
searches: all axes at once (`ilp`, `optcnn`), `osdp`, parts of the model on separate ranks
(`dlplacer`, `stanza`), separately planned stages if the step has micro-batches (`galvatron`,
`alpa`), `tofu`, `greedy`. All are compared by the figures of the compiled plan, so the result is no
slower than any candidate that was tried. The report lists those for which there was no time.

If no plan fits, or a plan that does not fit is faster than the best one, optimizer states are
offloaded to host memory, if the devices have any (`offloading`). This is tried for the fastest and
the leanest plans that do not fit. If nothing fits and the step has variants (`PlanRequest.family`),
smaller variants (`variants`) are tried until one fits: recomputed activations, operators in slices,
more micro-batches. The leanest candidates come first. If a plan that does not fit is faster than
the best one, `osdp` chooses among the variants, too.

Complexity: candidates x (planning + compilation), or `time_limit_s`; at least one candidate is
tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from time import monotonic

from sbp_core.errors import ConfigError, MemoryLimitError, PlanError, SbpError
from sbp_core.graph import LogicalGraph, block_of, graph_hash
from sbp_core.graph_variant import GraphFamily, GraphVariant
from sbp_core.infer import PIPE_AXIS, infer_strategy, pipelined
from sbp_core.placement import Placement
from sbp_core.planning import (
    Compiled,
    PlanContext,
    Planner,
    PlanRequest,
    SearchedPlanner,
    smaller_variants,
    splits_classes,
    until_it_fits,
    variant_words,
)
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes
from sbp_planner.alpa import AlpaPlanner
from sbp_planner.configs import OsdpConfig
from sbp_planner.galvatron import GalvatronPlanner
from sbp_planner.greedy import GreedyPlanner
from sbp_planner.ilp import IlpPlanner
from sbp_planner.meshes import DATA, is_bound, other_meshes, reshaped
from sbp_planner.optcnn import OptcnnPlanner
from sbp_planner.osdp import OsdpPlanner
from sbp_planner.placers import DlplacerPlanner, StanzaPlanner
from sbp_planner.search_configs import (
    AlpaConfig,
    AutoConfig,
    DlplacerConfig,
    GalvatronConfig,
    GreedyConfig,
    IlpConfig,
    OptcnnConfig,
    StanzaConfig,
    TofuConfig,
)
from sbp_planner.starting_pins import StartingPins, starting_pins
from sbp_planner.tofu import TofuPlanner

#: Share of the time for the requested step, if it has other variants.
_FIRST_SHARE = 0.5

#: How many of the candidates are tried again for smaller variants.
_NUM_LEANEST = 4

#: Plans that split no classes and take less than so many times the best time are tried again with
#: whole softmaxes; at most so many, the fastest first.
_NEAR, _NUM_NEAR = 1.3, 3

#: How many of the fastest, and of the leanest, plans that do not fit are tried with offload.
_NUM_OFFLOADED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A way to plan a request; `plan` may raise `SbpError` if it finds no plan."""

    name: str
    plan: Callable[[PlanRequest], Strategy]


@dataclass(frozen=True, slots=True)
class AutoPlanner(SearchedPlanner):
    """Plans by the best of several other planners."""

    config: AutoConfig

    chooses_variants = places_states = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the fastest strategy of all candidates that fits.

        Raises:
            ConfigError: a pin of the user is invalid.
            PlanError: no candidate leads to a plan, or no plan fits; names the leanest plans.
        """
        request = context.request
        search = _Search(context, self.config)
        family = request.family
        if family is None:
            search.look_at(request, None, share=1.0)
            search.look_at_offload()
        elif not search.look_at(request, family.variant, share=_FIRST_SHARE):
            leanest = search.leanest()
            search.look_at_offload()
            if not search.look_at_smaller(family, leanest) and not search.fits:
                search.look_at_smaller(family)  # a lean candidate may need much on other variants
        if family is not None and search.is_short_of_memory and not search.is_out_of_time(1.0):
            search.look_at_offload()
            search.look_at_variants()
        search.join_classes()
        return search.result()


@dataclass(slots=True)
class _Search:
    context: PlanContext
    config: AutoConfig
    best: Compiled | None = None
    best_name: str = ""
    tried: dict[str, Compiled | SbpError] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    _best_candidate: _Candidate | None = None
    #: The candidate that made each plan.
    _looked_at: dict[str, _Candidate] = field(default_factory=dict)
    _ends: float = 0.0

    def __post_init__(self) -> None:
        self._ends = monotonic() + self.config.time_limit_s

    @property
    def request(self) -> PlanRequest:
        return self.context.request

    @property
    def fits(self) -> bool:
        """Whether the best plan fits."""
        return self.best is not None and self.best.fits

    def is_out_of_time(self, share: float) -> bool:
        """Whether a share of the time is up."""
        left = (1 - share) * self.config.time_limit_s
        return monotonic() > self._ends - left

    def look_at(
        self,
        request: PlanRequest,
        variant: GraphVariant | None,
        *,
        share: float,
        names: Collection[str] = (),
    ) -> bool:
        """Try candidates for one variant of the step; return whether one of them fits.

        Args:
            request: The request for that variant.
            variant: The variant; None if there are none.
            share: Share of the time after which no new candidate is tried while none fits.
            names: Names of the candidates to try; all if empty.
        """
        quiet = replace(request, progress=None, family=None)
        compilation = self.context.compilation(quiet)
        is_first = request.graph is self.request.graph
        of = "" if variant is None or is_first else f" ({variant_words(variant)})"
        candidates = [
            one
            for one in self._candidates(quiet)
            if (not names or one.name in names) and one.name + of not in self.tried
        ]
        fits = False
        for index, candidate in enumerate(candidates):
            name = candidate.name + of
            # Candidates that are kept for smaller variants are not needed once a plan fits.
            until = 1.0 if self.fits else share
            if self.is_out_of_time(until) and self.best is not None:
                self.untried += [one.name + of for one in candidates[index:]]
                break
            self.context.say(f"trying {name}", index / len(candidates))
            try:
                found = compilation.compiled(candidate.plan(quiet), exact=True)
            except SbpError as error:
                self.tried[name] = error
                continue
            self._looked_at[name] = candidate
            self._note(name, found, variant, candidate)
            fits = fits or found.fits
        return fits

    def _note(
        self,
        name: str,
        found: Compiled,
        variant: GraphVariant | None,
        candidate: _Candidate | None = None,
    ) -> None:
        """Record a plan of a variant; it is the best so far if it ranks before that one."""
        self.tried[name] = found
        if self.best is None or found.rank() < self.best.rank():
            self.best = replace(found, strategy=replace(found.strategy, variant=variant))
            self.best_name, self._best_candidate = name, candidate

    def look_at_smaller(self, family: GraphFamily, names: Collection[str] = ()) -> bool:
        """Try candidates for smaller variants of the step, until a plan fits."""
        for variant in smaller_variants(family):
            if self.is_out_of_time(1.0):
                self.untried.append("smaller variants of the step")
                break
            try:
                smaller = self.request.of(variant)
            except SbpError as error:
                self.tried[variant_words(variant)] = error
                continue
            if self.look_at(smaller, variant, share=1.0, names=names):
                return True
        return False

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a plan that does not fit is faster than the best one, or no plan fits."""
        plans = [one for one in self.tried.values() if isinstance(one, Compiled)]
        best = self.best
        return best is None or any(not one.fits and one.step_s < best.step_s for one in plans)

    def look_at_variants(self) -> None:
        """Let `osdp` choose a variant of the step on the requested mesh."""
        name, left_s = "osdp among variants of the step", max(self._ends - monotonic(), 1e-3)
        osdp = OsdpPlanner(
            OsdpConfig(
                memory_bytes=self.context.limit_bytes,
                time_limit_s=left_s,
                offload=self.config.offload,
            )
        )
        try:
            strategy = osdp.plan(replace(self.request, progress=None))
            assert strategy.variant is not None, "the step has variants"
            compilation = self.context.compilation(self.request.of(strategy.variant))
            found = compilation.compiled(strategy, exact=True)
        except SbpError as error:
            self.tried[name] = error
            return
        self._note(name, found, strategy.variant)

    def look_at_offload(self) -> None:
        """Try plans that do not fit again, with some of their states in host memory."""
        has_host = self.request.cluster.device.host_memory_bytes is not None
        is_chosen = self.config.offload == "auto" and not self.request.offloaded
        if not (has_host and is_chosen) or (self.fits and not self.is_short_of_memory):
            return
        own = graph_hash(self.request.graph)
        plans = {
            name: one
            for name, one in self.tried.items()
            # Smaller variants are slower than the step, and fit more often.
            if isinstance(one, Compiled) and not one.fits and one.strategy.graph_hash == own
        }
        fastest = sorted(plans, key=lambda name: plans[name].step_s)[:_NUM_OFFLOADED]
        leanest = sorted(plans, key=lambda name: plans[name].memory_bytes)[:_NUM_OFFLOADED]
        names = list(dict.fromkeys((*fastest, *leanest)))
        for index, name in enumerate(names):
            if self.is_out_of_time(1.0):
                self.untried += [f"{one} with offload" for one in names[index:]]
                break
            if f"{name} with offload" in self.tried:
                continue
            one = plans[name]
            if self.best is not None and self.best.fits and one.step_s >= self.best.step_s:
                continue  # copies do not make a plan faster
            self.context.say(f"trying {name} with offload", index / len(names))
            try:
                found = until_it_fits(self.context.compilation(), one.strategy)
            except SbpError as error:
                self.tried[f"{name} with offload"] = error
                continue
            if found is not None:
                variant = None if self.request.family is None else self.request.family.variant
                self._note(f"{name} with offload", found, variant)

    def join_classes(self) -> None:
        """Try the fastest plans that split no classes again, with whole softmaxes.

        A softmax in one operator is faster. Softmaxes in parts are only for plans that split the
        classes over ranks. So a plan that splits no classes may now become the fastest.
        """
        family, best = self.request.family, self.best
        if family is None or best is None or self._best_candidate is None:
            return
        variant = best.strategy.variant
        if variant is None or not variant.splits_classes:
            return
        whole = replace(variant, splits_classes=False)
        try:
            request = self.request.of(whole)
        except SbpError:
            return
        if graph_hash(request.graph) == best.strategy.graph_hash:
            return
        compilation = self.context.compilation(request)
        for candidate in self._without_classes(best):
            try:
                strategy = candidate.plan(replace(request, progress=None))
                found = compilation.compiled(strategy, exact=True)
            except SbpError:
                continue
            self._note(f"{candidate.name}, softmaxes whole", found, whole, candidate)

    def _without_classes(self, best: Compiled) -> list[_Candidate]:
        """Return the candidates for the best plan's variant that split no classes, fastest first.

        Plans for other variants have other graphs and are left out. The best plan is always tried;
        of the other plans only a few that are not much slower.
        """
        assert self._best_candidate is not None, "a candidate made the best plan"
        chosen = [] if splits_classes(best.strategy) else [self._best_candidate]
        others = sorted(
            (one.step_s, name)
            for name, one in self.tried.items()
            if isinstance(one, Compiled)
            and name in self._looked_at
            and self._looked_at[name] is not self._best_candidate
            and one.fits
            and one.strategy.graph_hash == best.strategy.graph_hash
            and one.step_s < _NEAR * best.step_s
            and not splits_classes(one.strategy)
        )
        return chosen + [self._looked_at[name] for _, name in others[:_NUM_NEAR]]

    def _candidates(self, request: PlanRequest) -> Iterator[_Candidate]:
        given = request.mesh
        yield from self._on(given)
        meshes: list[Placement] = []
        if not is_bound(request.pins, given) and given.size > 1:
            blocks = len(_blocks(request.graph))
            several = request.graph.num_micro_batches > 1
            meshes = list(other_meshes(given, num_blocks=blocks, pipelines=several))
        for mesh in meshes:
            yield from self._on(mesh)
        if PIPE_AXIS not in given.axes:
            yield from self._searches(given)

    def _on(self, mesh: Placement) -> Iterator[_Candidate]:
        """Yield, for one mesh, a candidate that infers from each set of starting pins."""
        try:
            first = pipelined(mesh, "1f1b", self.request.graph.num_micro_batches).stages[0]
        except ConfigError:
            first = mesh
        for name, way in starting_pins(first).items():

            def plan(request: PlanRequest, way: StartingPins = way) -> Strategy:
                stages = pipelined(
                    mesh,
                    self.config.pipeline,
                    request.graph.num_micro_batches,
                    num_updates=request.graph.num_updates,
                )
                return infer_strategy(
                    replace(request, mesh=mesh),
                    planner="auto",
                    pins=way.of(request.graph, first),
                    stages=stages.stages,
                    in_flight=stages.in_flight,
                    orders=stages.orders,
                    staleness=stages.staleness,
                )

            yield _Candidate(name=f"{name} on {_mesh_words(mesh)}", plan=plan)

    def _searches(self, mesh: Placement) -> Iterator[_Candidate]:
        # Offloading is tried once all candidates are known (`look_at_offload`).
        limit, seconds = self.context.limit_bytes, self.config.time_limit_s
        ilp = IlpPlanner(
            IlpConfig(offload=(), memory_bytes=limit, time_limit_s=seconds / 4, gap=0.01)
        )
        yield _Candidate(name=f"ilp on {_mesh_words(mesh)}", plan=ilp.plan)
        osdp = OsdpPlanner(OsdpConfig(offload=(), memory_bytes=limit))
        yield _Candidate(name=f"osdp on {_mesh_words(mesh)}", plan=osdp.plan)
        dlplacer = DlplacerPlanner(
            DlplacerConfig(offload=(), memory_bytes=limit, time_limit_s=seconds / 8)
        )
        yield _Candidate(name="dlplacer", plan=dlplacer.plan)
        if mesh.mesh_shape[0] > 1:
            stanza = StanzaPlanner(
                StanzaConfig(offload=(), memory_bytes=limit, time_limit_s=seconds / 8)
            )
            yield _Candidate(name="stanza", plan=stanza.plan)
        yield from self._stage_searches(mesh)
        yield _Candidate(name="optcnn", plan=OptcnnPlanner(OptcnnConfig(offload=())).plan)
        yield _Candidate(name="tofu", plan=TofuPlanner(TofuConfig(offload=())).plan)
        if len(mesh.axes) <= 2:  # on three, pricing the conversions would take minutes
            yield _Candidate(name="greedy", plan=GreedyPlanner(GreedyConfig(offload=())).plan)

    def _stage_searches(self, mesh: Placement) -> Iterator[_Candidate]:
        """Yield the planners that cut the model into stages, which needs micro-batches."""
        request, limit = self.request, self.context.limit_bytes
        few = request.graph.num_micro_batches == 1 or mesh.size == 1
        if few or is_bound(request.pins, mesh) or len(_blocks(request.graph)) < 2:
            return
        one = mesh if len(mesh.axes) == 1 else reshaped(mesh, (mesh.size,), (DATA,))
        seconds = self.config.time_limit_s / 4
        planners: dict[str, Planner] = {
            "galvatron": GalvatronPlanner(
                GalvatronConfig(offload=(), memory_bytes=limit, time_limit_s=seconds)
            ),
            "alpa": AlpaPlanner(AlpaConfig(offload=(), memory_bytes=limit, time_limit_s=seconds)),
        }
        for name, planner in planners.items():

            def plan(asked: PlanRequest, planner: Planner = planner) -> Strategy:
                return planner.plan(replace(asked, mesh=one))

            yield _Candidate(name=f"{name} on {_mesh_words(one)}", plan=plan)

    def result(self) -> Strategy:
        """Return the best strategy, with all candidates in its report."""
        if self.best is None:
            for found in self.tried.values():
                if isinstance(found, SbpError):
                    raise found
            raise PlanError("no candidate was looked at", todo="raise planner.time_limit_s")
        if not self.best.fits:
            least = self.leanest()[0]
            needed = self.tried[least]
            assert isinstance(needed, Compiled), "it was compiled"
            raise MemoryLimitError(
                f"nothing that was tried fits the {format_bytes(self.context.limit_bytes)} of a "
                f"rank: the least, {least}, needs {format_bytes(needed.memory_bytes)}",
                where="planner auto",
                accepted=f"{self.context.limit_key} >= {needed.memory_bytes:.0f}",
                todo="take more ranks or trainer.micro_batches, set compile.passes.recompute, or "
                "raise planner.time_limit_s, so that more is tried",
            )
        plans = {name: one for name, one in self.tried.items() if isinstance(one, Compiled)}
        ranked = sorted(plans.items(), key=lambda entry: entry[1].rank())
        lines = [f"auto: {self.best_name} is the fastest of {len(plans)} plans that were compiled"]
        lines += [f"  {name}: {one}" for name, one in ranked[: self.config.num_shown]]
        if len(ranked) > self.config.num_shown:
            lines.append(f"  ... and {len(ranked) - self.config.num_shown} that are slower")
        if self.untried:
            lines.append(f"  not tried within {self.config.time_limit_s:g} s: " + ", ".join(
                self.untried[:4]) + ", ..." * (len(self.untried) > 4))  # fmt: skip
        own = self.best.strategy.report.get("explanation", ())
        report = {
            "tried": {name: one.step_s for name, one in ranked},
            "untried": list(self.untried),
            "explanation": [*lines, *own],
        }
        strategy = self.best.strategy
        return replace(strategy, planner="auto", report={**strategy.report, **report})

    def leanest(self) -> list[str]:
        """Return the candidates whose plans need the least memory, in ascending order."""
        plans = {name: one for name, one in self.tried.items() if isinstance(one, Compiled)}
        return sorted(plans, key=lambda name: plans[name].memory_bytes)[:_NUM_LEANEST]


def _blocks(graph: LogicalGraph) -> set[str]:
    return {block for node in graph.nodes if (block := block_of(node.module))}


def _mesh_words(mesh: Placement) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in zip(mesh.axes, mesh.mesh_shape, strict=True))
