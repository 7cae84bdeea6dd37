"""The search around all planners: a planner proposes, and the search fits what it proposes.

    planner     propose(context) -> strategy        the idea of its paper
    search      compiles it, places states in the memory of the host where memory is short, asks
                again, and takes the faster of what fits

    offload = patterns      every strategy has these states in host memory, and no others
    offload = auto          1. propose with all states on the device
                            2. if nothing fits, or the fastest of any memory would be faster by more
                               than a little: propose with all states of the optimizer in host
                               memory, take back as many as fit (`offload_fit`), and propose again
                               with those that stay there
                            3. take the faster of what fits, in simulated time; without offload
                               among equals

Where states are placed is part of the request (`PlanRequest.offloaded`). So whatever planner it is
counts their copies among its costs and nothing of them on the device, and its plans are compiled
with them: it may share parameters out less, make fewer activations again, or take fewer
micro-batches.

Planners that know no limit of memory are asked once; if their plan does not fit, as few states as
it takes are offloaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, ClassVar, TypeAlias

from sbp_core.compile import offloadable
from sbp_core.errors import SbpError
from sbp_core.infer import predict_cost
from sbp_core.plan_request import PlanRequest
from sbp_core.planning.compiled import Compilation, Compiled, limit_key
from sbp_core.planning.host_states import by_parameter, offloaded_states, states_named, with_states
from sbp_core.planning.offload_fit import until_it_fits
from sbp_core.planning.offload_setting import Offload
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds

#: Plans a request within so many seconds.
PlanWithin: TypeAlias = Callable[[PlanRequest, float], Strategy]

#: Host memory is not looked at to save less than this share of a step.
_LEAST_GAIN = 0.01

#: Times that a planner is asked again, for a plan with the states that stay offloaded.
_MAX_AGAIN = 2

#: Of the time limit, what planning with states offloaded may take once it is up.
_LATE_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """What a planner proposes a strategy for.

    Args:
        request: The step, its variants, the mesh, the machine, and the pins of the user.
        limit_bytes: Memory of a rank, in bytes.
        limit_key: The setting that says the limit, for messages.
        time_limit_s: For this proposal, in seconds; 0 if the planner has no such setting.
    """

    request: PlanRequest
    limit_bytes: float
    limit_key: str
    time_limit_s: float = 0.0

    def compilation(self, request: PlanRequest | None = None) -> Compilation:
        """Return what compiles strategies and holds them against the limit.

        Args:
            request: Of a variant of the step; that of the context if None.
        """
        quiet = replace(request or self.request, progress=None, family=None)
        return Compilation(request=quiet, limit_bytes=self.limit_bytes)

    def say(self, what: str, fraction: float) -> None:
        """Tell the user what is done, and which share of it is done, in [0, 1]."""
        if self.request.progress is not None:
            self.request.progress(what, fraction)


class SearchedPlanner(ABC):
    """A planner that proposes strategies; the search around it does the rest.

    Its `config` may have the settings `memory_bytes` (of a rank; that of the cluster by default),
    `time_limit_s` and `offload` (see `offload_setting`).
    """

    __slots__ = ()

    #: Whether it chooses among the variants of a step, micro-batches among them.
    chooses_variants: ClassVar[bool] = False
    #: Whether what it proposes keeps to the limit of memory, or nothing is proposed.
    keeps_limit: ClassVar[bool] = False
    #: Whether it places states in host memory itself, where that is left to the planner.
    places_states: ClassVar[bool] = False

    config: Any

    @abstractmethod
    def propose(self, context: PlanContext) -> Strategy:
        """Return a legal strategy.

        Raises:
            ConfigError: a setting or a pin cannot be meant.
            PlanError: nothing that was found fits, or nothing fulfils the pins.
        """

    def gain(self, planned: Strategy) -> float | None:
        """Return the share of a step that the fastest of any memory would save at most.

        None if that is not known, so that host memory is looked at only where nothing fits.
        """
        return None

    def plan(self, request: PlanRequest) -> Strategy:
        """Return what it proposes, with states in the memory of the host where that is asked for.

        Raises:
            ConfigError: a pattern names no state, or there is no memory of a host.
            SbpError: see `propose`; if nothing fits with states in host memory either, it says so.
        """
        config = self.config
        time_limit_s = float(getattr(config, "time_limit_s", 0.0))
        memory_bytes = getattr(config, "memory_bytes", None)
        limit_bytes = memory_bytes or request.cluster.device.memory_bytes
        offload: Offload = getattr(config, "offload", "auto")

        def propose(asked: PlanRequest, seconds: float) -> Strategy:
            return self.propose(
                PlanContext(
                    request=asked,
                    limit_bytes=limit_bytes,
                    limit_key=limit_key(memory_bytes),
                    time_limit_s=seconds,
                )
            )

        if offload != "auto":
            names = states_named(request, offload)
            if not names:
                return propose(request, time_limit_s)
            planned = propose(replace(request, offloaded=names), time_limit_s)
            return _told(request, planned, "as planner.offload asks for")
        if self.places_states or not may_offload(request):
            return propose(request, time_limit_s)
        if not self.keeps_limit:
            return fitted(request, propose(request, time_limit_s))
        search = _OffloadSearch(
            request=request, plan=propose, limit_bytes=limit_bytes, time_limit_s=time_limit_s
        )
        return search.run(self.gain)


def may_offload(request: PlanRequest) -> bool:
    """Whether the search may place states in host memory, which nobody has placed."""
    no_host = request.cluster.device.host_memory_bytes is None
    return not (no_host or request.offloaded) and bool(offloadable(request.graph))


def fitted(request: PlanRequest, strategy: Strategy) -> Strategy:
    """Return a strategy with as few states offloaded as it needs to fit; unchanged if none do."""
    of = _variant_of(request, strategy)
    limit = request.cluster.device.memory_bytes
    compilation = Compilation(request=of, limit_bytes=limit)
    usual = compilation.compiled(strategy)
    if usual.fits:
        return strategy
    found = until_it_fits(compilation, strategy)
    if found is None:
        return strategy
    needs = format_bytes(usual.memory_bytes)
    why = f"as the plan needs {needs} of {format_bytes(limit)} without"
    return _told(request, found.strategy, why)


@dataclass(slots=True, kw_only=True)
class _OffloadSearch:
    """The search for what pays.

    Args:
        request: What is planned.
        plan: Proposes within so many seconds.
        limit_bytes: Memory of a rank.
        time_limit_s: For all proposals together.
    """

    request: PlanRequest
    plan: PlanWithin
    limit_bytes: float
    time_limit_s: float
    #: The plan with all states offloaded, whatever the host has room for.
    roomy: Strategy | None = None
    #: Why there is none, or none with some of them.
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
        saved = gain(strategy)
        if saved is None or saved < _LEAST_GAIN:
            return strategy
        usual, found = self._compilation(strategy).compiled(strategy), self._best()
        without = format_seconds(usual.step_s)
        if found is not None and found.step_s < usual.step_s:
            why = f"{found}; without, {without} a step is the fastest that fits"
            return _told(self.request, found.strategy, why)
        takes = "nothing that was found fits" if found is None else f"a step takes {found}"
        return _with_line(strategy, f"host memory: with states there {takes}; {without} without")

    def _best(self) -> Compiled | None:
        """Return the fastest plan that was found and fits with states in the memory of the host."""
        # How they are cut is not known yet, so the host first has as much room as they may take.
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
            # Of equals the later one, as its report is of what stays offloaded.
            found = again
            if offloaded_states(found.strategy) == names:
                break
        return found

    def _planned(self, request: PlanRequest, names: frozenset[str]) -> Strategy | None:
        """Return the plan with some states offloaded; None if there is none."""
        if request.progress:
            request.progress(f"planning with {len(names)} states in host memory", 0.0)
        seconds = max(self._left_s, _LATE_SHARE * self.time_limit_s)
        try:
            return self.plan(replace(request, offloaded=names), seconds)
        except SbpError as error:
            self.problem = self.problem or error
            return None

    def _fitting(self, strategy: Strategy | None) -> Compiled | None:
        """Return a plan with as few states offloaded as it takes; None if it does not fit."""
        if strategy is None:
            return None
        found = until_it_fits(self._compilation(strategy), strategy)
        planned = offloaded_states(strategy)
        if found is None or offloaded_states(found.strategy) == planned:
            return found
        # What the planner says is of its own plan.
        first = f"planned with {len(planned)} states in the memory of the host, of which some stay:"
        told = [first, *found.strategy.report.get("explanation", ())]
        report = {**found.strategy.report, "explanation": told}
        return replace(found, strategy=replace(found.strategy, report=report))

    def _with_larger_host(self) -> Compiled | None:
        """Return what the roomy plan comes to with as few states offloaded as it takes."""
        assert self.roomy is not None, "it is asked for where there is one"
        request = _with_larger_host(_variant_of(self.request, self.roomy))
        compilation = Compilation(request=request, limit_bytes=self.limit_bytes)
        return until_it_fits(compilation, self.roomy)

    def _compilation(self, strategy: Strategy) -> Compilation:
        request = _variant_of(self.request, strategy)
        return Compilation(request=request, limit_bytes=self.limit_bytes)

    @property
    def _left_s(self) -> float:
        return self.begun_s + self.time_limit_s - monotonic()

    def _refusal(self, failure: SbpError) -> SbpError:
        """Return the error of what does not fit with states in host memory either."""
        problem = self.problem
        if problem is not None and problem.what == failure.what:
            return failure  # of something else than memory
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


def _variant_of(request: PlanRequest, strategy: Strategy) -> PlanRequest:
    """Return the request of the variant of the step that a strategy is for."""
    quiet = replace(request, progress=None)
    if quiet.family is None or strategy.variant is None:
        return replace(quiet, family=None)
    return quiet.of(strategy.variant)


def _all(request: PlanRequest) -> frozenset[str]:
    return frozenset(offloadable(request.graph))


def _with_larger_host(request: PlanRequest) -> PlanRequest:
    """Return the request for ranks whose hosts have room for all states of the whole step."""
    device = request.cluster.device
    host_bytes = max(device.host_memory_bytes or 0, _whole_bytes(request))
    device = replace(device, host_memory_bytes=host_bytes)
    return replace(request, cluster=replace(request.cluster, device=device))


def _largest(request: PlanRequest) -> frozenset[str]:
    """Return the largest states that a host has room for, however they are cut; not if for all."""
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
    """Return what all states that can be offloaded take on one rank that has all of them whole."""
    return sum(request.graph.tensor(name).size_bytes for name in offloadable(request.graph))


def _told(request: PlanRequest, strategy: Strategy, why: str) -> Strategy:
    """Return a strategy whose report says what is offloaded, and why."""
    names = offloaded_states(strategy)
    found = with_states(request, strategy, names)
    if not names:
        return found
    of = _variant_of(request, strategy)
    predicted = predict_cost(of.graph, found, request.cluster, request.options)
    return _with_line(replace(found, report={**found.report, **predicted}), f"  {why}")


def _with_line(strategy: Strategy, line: str) -> Strategy:
    lines = [*strategy.report.get("explanation", ()), line]
    return replace(strategy, report={**strategy.report, "explanation": lines})
