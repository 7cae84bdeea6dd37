"""The planner `propagate`: try a few sets of pins, and take the fastest plan that fits.

A pin fixes how some tensors are split, such as the batch along its samples. Sharding propagation
decides all other tensors, one mesh axis after the other, at least predicted cost. The pins matter
more than the propagation. For transformers, whose layers keep samples apart, the fastest plan needs
all activations pinned to the sample dim. Where layers mix samples (batch norms) or are small, it
needs only the batch pinned. So a few sets of pins are tried, each propagated and compiled. The set
that also shards the states needs the least memory. `ilp` and `osdp` search further for memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from sbp_core.errors import ConfigError, SbpError
from sbp_core.infer import PinValue, Pipelined, infer_strategy
from sbp_core.planning import (
    Compilation,
    Compiled,
    PlanContext,
    PlanRequest,
    SearchedPlanner,
    best_buckets,
    told_buckets,
)
from sbp_core.simulation import simulate
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.configs import PropagateConfig
from sbp_planner.schedules import with_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The memory of the plan for a set of pins, see `Compilation.memory`."""

    memory_bytes: float
    host_bytes: float
    is_exact: bool
    compilation: Compilation

    @property
    def fits(self) -> bool:
        """Whether it fits; also true if that is unknown."""
        return not self.is_exact or (
            self.memory_bytes <= self.compilation.limit_bytes
            and self.host_bytes <= self.compilation.host_limit_bytes
        )


@dataclass(frozen=True, slots=True)
class PropagatePlanner(SearchedPlanner):
    """Plans any model on any mesh."""

    config: PropagateConfig

    def propose(self, context: PlanContext) -> Strategy:
        """Return the strategy whose compiled plan takes the least predicted time and fits.

        Its report lists under `tried` the seconds of a step for each set of pins; infinity if a set
        leads to no plan. Of equal times the first is taken. If nothing fits, the leanest plan is
        returned, so that a later memory check can report its parts. Plans that do not fit are
        compiled with smaller buckets, too.

        Raises:
            ConfigError: a pin or a stage pattern is invalid.
            SbpError: no set of pins leads to a plan; the error of the first set.
        """
        request = context.request
        limit = request.cluster.device.memory_bytes
        compilation = Compilation(request=replace(request, progress=None), limit_bytes=limit)
        made: dict[str, Strategy] = {}
        tried: dict[str, float] = {}
        problems: list[SbpError] = []
        fastest = ""
        for index, (name, pins) in enumerate(self.config.pin_sets.items()):
            if request.progress:
                request.progress(f"trying {name!r}", index / len(self.config.pin_sets))
            try:
                made[name] = self._propagate(replace(request, progress=None), pins)
                plan = compilation.plan(made[name])
                tried[name] = simulate(plan).step_s
                if not fastest or tried[name] < tried[fastest]:
                    fastest = name
            except ConfigError:
                raise  # an invalid pin is a mistake, even if another set leads to a plan
            except SbpError as error:
                problems.append(error)
                tried[name] = inf
        if not fastest:
            raise problems[0]
        held: dict[str, _Held] = {}
        packed: dict[str, Compiled] = {}  # with other buckets
        for name in sorted((n for n in tried if tried[n] < inf), key=lambda name: tried[name]):
            plan = compilation.plan(made[name])  # the last plans are cached
            memory_bytes, host_bytes, is_exact = compilation.memory(plan)
            held[name] = _Held(
                memory_bytes=memory_bytes,
                host_bytes=host_bytes,
                is_exact=is_exact,
                compilation=compilation,
            )
            if held[name].fits:
                break
            smaller = best_buckets(compilation, made[name])
            if smaller is not None:
                packed[name] = smaller

        def rank(fits: bool, step_s: float, memory_bytes: float) -> tuple[bool, float]:
            return not fits, step_s if fits else memory_bytes

        best = min(held, key=lambda n: rank(held[n].fits, tried[n], held[n].memory_bytes))
        report = {"tried": tried, "explanation": list(_lines(tried, held, best, limit))}
        usual = rank(held[best].fits, tried[best], held[best].memory_bytes)
        ranks = {n: rank(one.fits, one.step_s, one.memory_bytes) for n, one in packed.items()}
        least = min(ranks, key=ranks.__getitem__, default=best)
        if ranks.get(least, usual) >= usual:
            return replace(made[best], report={**made[best].report, **report})
        found = packed[least]
        of = replace(found.strategy, report={**found.strategy.report, **report})
        why = f"{least}, which needs {format_bytes(held[least].memory_bytes)} with larger ones"
        return told_buckets(request, replace(found, strategy=of), why)

    def _propagate(self, request: PlanRequest, pins: Mapping[str, PinValue]) -> Strategy:
        def propagate(stages: Pipelined) -> Strategy:
            return infer_strategy(
                request,
                planner="propagate",
                pins=pins,
                stage_patterns=self.config.stage_patterns,
                stages=stages.stages,
                in_flight=stages.in_flight,
                orders=stages.orders,
                staleness=stages.staleness,
            )

        return with_schedule(request, self.config, propagate)


def _lines(
    tried: Mapping[str, float], held: Mapping[str, _Held], best: str, limit_bytes: float
) -> Iterator[str]:
    told = ", ".join(
        f"{name} {format_seconds(time) if time < inf else 'no plan'}"
        for name, time in sorted(tried.items(), key=lambda one: one[1])
    )
    short = {name: one for name, one in held.items() if not one.fits}
    if not short:
        yield f"propagate: fastest of what was tried: {told}"
        return
    needed = ", ".join(
        f"{name} needs {format_bytes(one.memory_bytes)}" for name, one in short.items()
    )
    limit = format_bytes(limit_bytes)
    if not held[best].fits:
        yield f"propagate: nothing that was tried fits {limit}: {needed}"
    else:
        yield f"propagate: {best}, the fastest of what was tried and fits {limit}: {told}; {needed}"
    yield "  planner=ilp and planner=osdp look for what is faster within the memory of a rank"
