"""`SearchedPlanner`: base class of planners; it makes their proposals fit the memory of devices.

    planner     propose(context) -> strategy        the method of its paper
    search      compiles it; where device memory is short, makes buckets smaller (`bucket_fit`) and
                places states in host memory, asks again, and takes the faster plan that fits

    offload = patterns      every strategy has these states in host memory, and no others
    offload = auto          1. propose with all states on the device
                            2. if nothing fits, or the fastest plan without a limit would be faster
                               by more than a little: propose with all states of the optimizer in
                               host memory, take back as many as fit (`offload_fit`), and propose
                               again with the remaining states in host memory
                            3. take the plan with the least simulated time that fits; among equals
                               the one without offload

The placement of states is part of the request (`PlanRequest.offloaded`). So every planner counts
their copies among its costs and none of their bytes on the device, and its plans are compiled with
them: it may shard parameters less, recompute fewer activations, or take fewer micro-batches.

Planners without a limit of memory are asked once; if their plan does not fit, it gets smaller
buckets, or as few states as necessary are offloaded, whichever is faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, ClassVar

from sbp_core.compile import offloadable
from sbp_core.errors import SbpError
from sbp_core.infer import predict_cost
from sbp_core.plan_request import PlanRequest
from sbp_core.planning.bucket_fit import (
    LATE_SHARE,
    LEAST_GAIN,
    BucketSearch,
    PlanWithin,
    best_buckets,
    told_buckets,
    told_gain,
)
from sbp_core.planning.compiled import Compilation, Compiled, limit_key, variant_of
from sbp_core.planning.host_states import by_parameter, offloaded_states, states_named, with_states
from sbp_core.planning.offload_fit import until_it_fits
from sbp_core.planning.offload_setting import Offload
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds

#: How often a planner is asked again, for a plan with the states that stay offloaded.
_MAX_AGAIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """The task for which a planner proposes a strategy.

    Args:
        request: The step, its variants, the mesh, the machine, and the pins of the user.
        limit_bytes: Memory limit of a rank.
        limit_key: The name of the setting that limits memory, for messages.
        time_limit_s: Time for this proposal, in seconds; 0 if the planner has no such setting.
    """

    request: PlanRequest
    limit_bytes: float
    limit_key: str
    time_limit_s: float = 0.0

    def compilation(self, request: PlanRequest | None = None) -> Compilation:
        """Return a compilation, which compiles strategies and compares them with the limit.

        Args:
            request: The request of a variant of the step; the request of the context if None.
        """
        quiet = replace(request or self.request, progress=None, family=None)
        return Compilation(request=quiet, limit_bytes=self.limit_bytes)

    def say(self, what: str, fraction: float) -> None:
        """Report to the user what is being done, and which share of it is done, in [0, 1]."""
        if self.request.progress is not None:
            self.request.progress(what, fraction)


class SearchedPlanner(ABC):
    """A planner that proposes strategies; the search around it does the rest.

    Its `config` may have the settings `memory_bytes` (of a rank; the cluster's by default),
    `time_limit_s` and `offload` (see `offload_setting`).
    """

    __slots__ = ()

    #: Whether it chooses among the variants of a step, including numbers of micro-batches.
    chooses_variants: ClassVar[bool] = False
    #: Whether every proposal fits the limit of memory; otherwise `propose` raises.
    keeps_limit: ClassVar[bool] = False
    #: Whether it places states in host memory itself if `offload` is `auto`.
    places_states: ClassVar[bool] = False

    config: Any

    @abstractmethod
    def propose(self, context: PlanContext) -> Strategy:
        """Return a legal strategy.

        Raises:
            ConfigError: a setting or a pin does not apply to this request.
            PlanError: no strategy that was found fits, or none satisfies the pins.
        """

    def gain(self, planned: Strategy) -> float | None:
        """Return the share of a step that an unlimited memory would save at most.

        None if it is not known; host memory is then tried only if nothing fits.
        """
        return None

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the proposed strategy, with states in host memory as the setting `offload` asks.

        Raises:
            ConfigError: a pattern names no state, or the devices have no host memory.
            SbpError: see `propose`; the message says so if offloading is not enough either.
        """
        config = self.config
        time_limit_s = float(getattr(config, "time_limit_s", 0.0))
        memory_bytes = getattr(config, "memory_bytes", None)
        limit_bytes = memory_bytes or request.cluster.device.memory_bytes
        offload: Offload = getattr(config, "offload", "auto")

        def once(asked: PlanRequest, seconds: float) -> Strategy:
            return self.propose(
                PlanContext(
                    request=asked,
                    limit_bytes=limit_bytes,
                    limit_key=limit_key(memory_bytes),
                    time_limit_s=seconds,
                )
            )

        def propose(asked: PlanRequest, seconds: float) -> Strategy:
            return BucketSearch(
                request=asked,
                plan=once,
                gain=self.gain,
                limit_bytes=limit_bytes,
                time_limit_s=seconds,
            ).run()

        if offload != "auto":
            names = states_named(request, offload)
            asked = replace(request, offloaded=names)
            planned = propose(asked, time_limit_s)
            if not self.keeps_limit:
                planned = fitted(asked, planned, limit_bytes, offloads=False)
            if not names:
                return planned
            return _told(request, planned, "as planner.offload asks for")
        if not self.keeps_limit:
            offloads = not self.places_states
            found = propose(request, time_limit_s)
            return fitted(request, found, limit_bytes, offloads=offloads)
        if self.places_states or not may_offload(request):
            return propose(request, time_limit_s)
        search = _OffloadSearch(
            request=request, plan=propose, limit_bytes=limit_bytes, time_limit_s=time_limit_s
        )
        return search.run(self.gain)


def may_offload(request: PlanRequest) -> bool:
    """Whether the search may choose states for host memory: there is any, and no choice yet."""
    no_host = request.cluster.device.host_memory_bytes is None
    return not (no_host or request.offloaded) and bool(offloadable(request.graph))


def fitted(
    request: PlanRequest, strategy: Strategy, limit_bytes: float = 0.0, *, offloads: bool = True
) -> Strategy:
    """Return a strategy with smaller buckets, or as few offloaded states as fit, or the same one.

    Of two plans that fit, take the faster one. If none fits, take the size of buckets with which
    the plan needs least.

    Args:
        request: The request that was planned.
        strategy: The strategy.
        limit_bytes: Memory of a rank; that of its device if 0.
        offloads: Whether states may be offloaded, if there is host memory for them.
    """
    limit_bytes = limit_bytes or request.cluster.device.memory_bytes
    compilation = Compilation(request=variant_of(request, strategy), limit_bytes=limit_bytes)
    usual = compilation.compiled(strategy)
    if usual.fits:
        return strategy
    is_open = strategy.bucket_bytes is None and usual.is_exact
    packed = best_buckets(compilation, strategy) if is_open else None
    offloaded: Compiled | None = None
    if offloads and may_offload(request):
        offloaded = until_it_fits(compilation, strategy)
        if offloaded is None and packed is not None and not packed.fits:
            offloaded = until_it_fits(compilation, packed.strategy)
    limit = format_bytes(limit_bytes)
    if packed is not None and (offloaded is None or packed.rank() <= offloaded.rank()):
        needs = format_bytes(compilation.compiled(strategy, exact=True).memory_bytes)
        return told_buckets(request, packed, f"with larger ones the plan needs {needs} of {limit}")
    if offloaded is None:
        return strategy
    needs = format_bytes(usual.memory_bytes)
    return _told(request, offloaded.strategy, f"as the plan needs {needs} of {limit} without")


@dataclass(slots=True, kw_only=True)
class _OffloadSearch:
    """The search for states whose offloading makes a plan fit or makes it faster.

    Args:
        request: The request that is planned.
        plan: Proposes a strategy within some seconds.
        limit_bytes: Memory limit of a rank.
        time_limit_s: Time for all proposals together.
    """

    request: PlanRequest
    plan: PlanWithin
    limit_bytes: float
    time_limit_s: float
    #: The plan with all states offloaded, regardless of the size of the host's memory.
    roomy: Strategy | None = None
    #: The error if no plan with all or some states offloaded was found.
    problem: SbpError | None = None
    begun_s: float = field(default_factory=monotonic)

    def run(self, gain: Callable[[Strategy], float | None]) -> Strategy:
        try:
            strategy = self.plan(self.request, self.time_limit_s)
        except SbpError as failure:
            found = self._best()
            if found is None:
                raise self._refusal(failure) from failure
            why = f"{found}, and nothing that was found fits without"
            return _told(self.request, found.strategy, why)
        saved = told_gain(strategy)
        saved = gain(strategy) if saved is None else saved
        if saved is None or saved < LEAST_GAIN:
            return strategy
        usual, found = self._compilation(strategy).compiled(strategy), self._best()
        without = format_seconds(usual.step_s)
        if found is not None and found.step_s < usual.step_s:
            why = f"{found}; without, {without} a step is the fastest that fits"
            return _told(self.request, found.strategy, why)
        takes = "nothing that was found fits" if found is None else f"a step takes {found}"
        return _with_line(strategy, f"host memory: with states there {takes}; {without} without")

    def _best(self) -> Compiled | None:
        """Return the fastest plan found that fits with states in host memory."""
        # How states are cut is not known yet, so at first the host gets room for all of them whole.
        self.roomy = self._planned(_with_larger_host(self.request), _all(self.request))
        found = self._fitting(self.roomy)
        if found is None and self.roomy is not None and (names := _largest(self.request)):
            found = self._fitting(self._planned(self.request, names))
        for _ in range(_MAX_AGAIN):
            if found is None or self._left_s <= 0:
                break
            names = offloaded_states(found.strategy)
            again = self._fitting(self._planned(self.request, names)) if names else None
            if again is None or again.rank()[:2] > found.rank()[:2]:
                break
            # Among equals, take the later plan, whose report is about the states that stay there.
            found = again
            if offloaded_states(found.strategy) == names:
                break
        return found

    def _planned(self, request: PlanRequest, names: frozenset[str]) -> Strategy | None:
        """Return the plan with some states offloaded; None if there is none."""
        if request.progress:
            request.progress(f"planning with {len(names)} states in host memory", 0.0)
        seconds = max(self._left_s, LATE_SHARE * self.time_limit_s)
        try:
            return self.plan(replace(request, offloaded=names), seconds)
        except SbpError as error:
            self.problem = self.problem or error
            return None

    def _fitting(self, strategy: Strategy | None) -> Compiled | None:
        """Return a plan with as few states offloaded as necessary; None if it does not fit."""
        if strategy is None:
            return None
        found = until_it_fits(self._compilation(strategy), strategy)
        planned = offloaded_states(strategy)
        if found is None or offloaded_states(found.strategy) == planned:
            return found
        # The planner's explanation is about its own plan, with more states offloaded.
        first = f"planned with {len(planned)} states in the memory of the host, of which some stay:"
        told = [first, *found.strategy.report.get("explanation", ())]
        report = {**found.strategy.report, "explanation": told}
        return replace(found, strategy=replace(found.strategy, report=report))

    def _with_larger_host(self) -> Compiled | None:
        """Return the roomy plan with as few states offloaded as necessary, on a larger host."""
        assert self.roomy is not None, "it is asked for where there is one"
        request = _with_larger_host(variant_of(self.request, self.roomy))
        compilation = Compilation(request=request, limit_bytes=self.limit_bytes)
        return until_it_fits(compilation, self.roomy)

    def _compilation(self, strategy: Strategy) -> Compilation:
        request = variant_of(self.request, strategy)
        return Compilation(request=request, limit_bytes=self.limit_bytes)

    @property
    def _left_s(self) -> float:
        return self.begun_s + self.time_limit_s - monotonic()

    def _refusal(self, failure: SbpError) -> SbpError:
        """Return the error for a step that does not fit with states in host memory either."""
        problem = self.problem
        if problem is not None and problem.what == failure.what:
            return failure  # memory is not the problem
        why = "" if problem is None else f": {problem.what}"
        todo = f"states of the optimizer in the memory of the host are not enough{why}"
        if self.roomy is not None and (found := self._with_larger_host()):
            has = format_bytes(self.request.cluster.device.host_memory_bytes or 0)
            todo = (
                f"host_memory_bytes >= {found.host_bytes:.0f}, where a rank has {has} of its host: "
                f"with so many bytes of states there, {found}"
            )
        both = ";\n    ".join(filter(None, (todo, failure.todo)))
        return failure.replaced(type(failure), todo=both)


def _all(request: PlanRequest) -> frozenset[str]:
    return frozenset(offloadable(request.graph))


def _with_larger_host(request: PlanRequest) -> PlanRequest:
    """Return the request for ranks whose hosts have room for all states of the whole step."""
    device = request.cluster.device
    host_bytes = max(device.host_memory_bytes or 0, _whole_bytes(request))
    device = replace(device, host_memory_bytes=host_bytes)
    return replace(request, cluster=replace(request.cluster, device=device))


def _largest(request: PlanRequest) -> frozenset[str]:
    """Return the largest states that fit a host even uncut; empty if all of them fit."""
    graph, left = request.graph, request.cluster.device.host_memory_bytes or 0
    if _whole_bytes(request) <= left:
        return frozenset()
    largest = set[str]()
    sizes = [(sum(graph.tensor(n).size_bytes for n in of), of) for of in by_parameter(graph)]
    for size, names in sorted(sizes, key=lambda one: -one[0]):
        if size <= left:
            left -= size
            largest.update(names)
    return frozenset(largest)


def _whole_bytes(request: PlanRequest) -> int:
    """Return the bytes of all offloadable states on one rank that has all of them whole."""
    return sum(request.graph.tensor(name).size_bytes for name in offloadable(request.graph))


def _told(request: PlanRequest, strategy: Strategy, why: str) -> Strategy:
    """Return a strategy whose report lists the offloaded states, and why they are offloaded."""
    names = offloaded_states(strategy)
    found = with_states(request, strategy, names)
    if not names:
        return found
    of = variant_of(request, strategy)
    predicted = predict_cost(of.graph, found, request.cluster, request.options)
    return _with_line(replace(found, report={**found.report, **predicted}), f"  {why}")


def _with_line(strategy: Strategy, line: str) -> Strategy:
    lines = [*strategy.report.get("explanation", ()), line]
    return replace(strategy, report={**strategy.report, "explanation": lines})
