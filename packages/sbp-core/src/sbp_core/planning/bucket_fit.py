"""Choose the size of buckets where memory is short.

A bucket is a flat buffer in which small tensors travel together (`sbp_core.compile.buckets`). Its
tensors are all in memory at once, such as all gathered parameters of a block. So large buckets need
more memory, and small ones more messages.

    choose      bucket_bytes, one of `bucket_sizes`, or the size by price
    minimise    simulated time of a step                                                     [s]
    such that   exact memory of each rank of the compiled plan <= limit                      [B]

    a strategy that is given    is compiled with every size (`best_buckets`)
    a planner that keeps        1. proposes with the size by price
    the limit                   2. if nothing fits, or the fastest plan without a limit would be
                                   faster by more than a little: proposes without buckets, gives
                                   that plan the best size, and proposes again with this size
                                3. the fastest of these plans that fit is taken
                                4. if nothing fits without buckets either, but nearly: proposes with
                                   every size, because a plan without buckets is nearly the smallest

A size in the compiler's options is the user's: nothing is chosen then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import TypeAlias

from sbp_core.boxing import StepKind
from sbp_core.compile import CompileOptions
from sbp_core.compile.bucket_price import most_bucket_bytes
from sbp_core.compile.packing import flat_step
from sbp_core.errors import MemoryLimitError, SbpError
from sbp_core.graph import InputKind
from sbp_core.infer import predict_cost
from sbp_core.plan_request import PlanRequest
from sbp_core.planning.compiled import Compilation, Compiled, variant_of
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds

#: Plans a request within some seconds.
PlanWithin: TypeAlias = Callable[[PlanRequest, float], Strategy]

#: Memory is not short if it costs less than this share of a step.
LEAST_GAIN = 0.01

#: The share of the time limit that another proposal may take once the limit is over.
LATE_SHARE = 0.25

#: Sizes are powers of two: the first below the size by price, each further one divided by this, and
#: 0, for no buckets.
_SHRINK, _NUM_SIZES = 4, 5

#: A plan without buckets is so near to the smallest one, relative to its memory: the order of
#: firings may differ.
_NEAR = 1.02

#: Where a report tells the choice.
_REPORT = "buckets"


def bucket_sizes(request: PlanRequest) -> tuple[int, ...]:
    """Return the sizes of buckets to try below the size by price, descending, in bytes.

    Empty if the user has chosen the size, or if there is only one rank.
    """
    if request.mesh.size == 1 or _options(request).bucket_bytes is not None:
        return ()
    graph, mesh = request.graph, request.mesh
    sizes = [graph.tensor(e.name).size_bytes for e in graph.inputs if e.kind is InputKind.PARAMETER]
    axes = [axis for axis, size in enumerate(mesh.mesh_shape) if size > 1]
    steps = [flat_step(StepKind.ALL_GATHER, mesh, (axis,), "float32", mesh.size) for axis in axes]
    by_price = max(most_bucket_bytes(step, _options(request).cluster) for step in steps)
    first = 1 << (min(sum(sizes), by_price) - 1).bit_length() - 1
    return (*filter(None, (first // _SHRINK**n for n in range(_NUM_SIZES))), 0)


def best_buckets(compilation: Compilation, strategy: Strategy) -> Compiled | None:
    """Return a strategy with the size of buckets that fits and is fastest.

    If no size fits, return the one that needs the least memory.

    Args:
        compilation: The compilation for the strategy's graph, with the limit.
        strategy: A strategy; the size that it has is one of those that are compared.

    Returns:
        None if there is nothing to choose (see `bucket_sizes`).

    Raises:
        PlanError: the strategy cannot be compiled.
    """
    sizes = bucket_sizes(compilation.request)
    if not sizes:
        return None
    found = [
        compilation.compiled(replace(strategy, bucket_bytes=size), exact=True)
        for size in dict.fromkeys((strategy.bucket_bytes, None, *sizes))
    ]
    fitting = [one for one in found if one.fits]
    if fitting:
        return min(fitting, key=Compiled.rank)
    return min(found, key=lambda one: (one.memory_bytes, one.step_s))


@dataclass(slots=True, kw_only=True)
class BucketSearch:
    """The search for the size of the buckets, around a planner that keeps to the limit.

    Args:
        request: The request that is planned.
        plan: Proposes a strategy within some seconds.
        gain: See `SearchedPlanner.gain`.
        limit_bytes: Memory limit of a rank.
        time_limit_s: Time for all proposals together; 0 if the planner has no such setting.
    """

    request: PlanRequest
    plan: PlanWithin
    gain: Callable[[Strategy], float | None]
    limit_bytes: float
    time_limit_s: float
    begun_s: float = field(default_factory=monotonic)

    def run(self) -> Strategy:
        """Return the fastest strategy that fits.

        Raises:
            MemoryLimitError: no proposal fits; the error of the proposal that needs least.
            SbpError: the planner raised it.
        """
        sizes = bucket_sizes(self.request)
        try:
            usual = self.plan(self.request, self.time_limit_s)
        except MemoryLimitError as failure:
            found = self._after(failure) if sizes else None
            if found is None:
                raise
            why = "nothing that was found fits with larger ones"
            return told_buckets(self.request, found, why, gain=1.0)
        saved = self.gain(usual) if sizes else None
        if saved is None or saved < LEAST_GAIN:
            return usual
        own = self._compilation(usual).compiled(usual, exact=True)
        unlimited_s = own.step_s * (1 - saved)
        if self._are_buckets_small(own) or self._left_s <= 0:
            return usual
        try:
            found = self._improved(self._proposed(0))
        except SbpError:
            return usual
        if found.rank() >= own.rank():
            return usual
        why = f"with larger ones, {format_seconds(own.step_s)} a step is the fastest that fits"
        gain = max(0.0, 1 - unlimited_s / found.step_s)
        return told_buckets(self.request, found, why, gain=gain)

    def _after(self, failure: MemoryLimitError) -> Compiled | None:
        """Return the fastest plan with smaller buckets than those with which nothing fits.

        Raises:
            MemoryLimitError: nothing fits; the error of the proposal that needs least.
        """
        least, least_size, bare_bytes = failure, 0, inf
        for size in reversed(bucket_sizes(self.request)):
            try:
                # What is refused should not depend on the time that the first proposal took.
                return self._improved(self._proposed(size, self.time_limit_s))
            except MemoryLimitError as error:
                if _least_bytes(error) < _least_bytes(least):
                    least, least_size = error, size
                bare_bytes = bare_bytes if size else _least_bytes(error)
            except SbpError:  # such as no plan in time
                break
            if bare_bytes > _NEAR * self.limit_bytes:
                break
        if least is failure:
            return None
        also = f"this is with compile.bucket_bytes={least_size}, as memory is short"
        todo = ";\n    ".join(filter(None, (least.todo, also)))
        raise least.replaced(MemoryLimitError, todo=todo) from failure

    def _improved(self, found: Compiled) -> Compiled:
        """Return the fastest of a plan, the same with other buckets, and a proposal with these."""
        best = best_buckets(self._compilation(found.strategy), found.strategy)
        assert best is not None, "there are sizes to choose from"
        size, saved = best.strategy.bucket_bytes, self.gain(found.strategy)
        if size != found.strategy.bucket_bytes:
            # The planner's explanation is about its own plan, with other buckets.
            own = f"planned with {_words(found.strategy)}, which have another size in the end:"
            lines = [own, *best.strategy.report.get("explanation", ())]
            strategy = replace(best.strategy, report={**best.strategy.report, "explanation": lines})
            best = replace(best, strategy=strategy)
        is_short = saved is None or saved >= LEAST_GAIN
        if size == found.strategy.bucket_bytes or size is None or not is_short or self._left_s <= 0:
            return best
        try:
            return min(best, self._proposed(size), key=Compiled.rank)
        except SbpError:
            return best

    def _proposed(self, size: int, seconds: float = 0.0) -> Compiled:
        """Return the planner's plan with buckets of a size.

        Args:
            size: The size.
            seconds: Time for it; at least the time that is left.

        Raises:
            MemoryLimitError: nothing fits.
        """
        request = replace(self.request, options=replace(_options(self.request), bucket_bytes=size))
        if request.progress:
            words = f"at most {format_bytes(size)}" if size else "one tensor"
            request.progress(f"planning with buckets of {words}", 0.0)
        if self.time_limit_s:
            seconds = max(seconds, self._left_s, LATE_SHARE * self.time_limit_s)
        strategy = replace(self.plan(request, seconds), bucket_bytes=size)
        return self._compilation(strategy).compiled(strategy, exact=True)

    def _are_buckets_small(self, own: Compiled) -> bool:
        """Whether a plan without its buckets would need hardly less memory."""
        bare = replace(own.strategy, bucket_bytes=0)
        without = self._compilation(bare).compiled(bare, exact=True)
        return own.memory_bytes - without.memory_bytes < LEAST_GAIN * self.limit_bytes

    def _compilation(self, strategy: Strategy) -> Compilation:
        request = variant_of(self.request, strategy)
        return Compilation(request=request, limit_bytes=self.limit_bytes)

    @property
    def _left_s(self) -> float:
        return self.begun_s + self.time_limit_s - monotonic() if self.time_limit_s else inf


def told_buckets(request: PlanRequest, found: Compiled, why: str, *, gain: float = 0.0) -> Strategy:
    """Return a strategy whose report tells the size of its buckets, and why.

    Args:
        request: The request that was planned.
        found: The plan.
        why: Why the size is not that by price.
        gain: The share of a step that memory without a limit would save at most.
    """
    strategy, of = found.strategy, variant_of(request, found.strategy)
    size = strategy.bucket_bytes
    if size is None:
        return strategy
    line = f"{_words(strategy)} (compile.bucket_bytes={size}): {found}; {why}"
    lines = [*strategy.report.get("explanation", ()), line]
    predicted = predict_cost(of.graph, strategy, request.cluster, request.options)
    report = {
        **strategy.report,
        **predicted,
        "explanation": lines,
        _REPORT: {"bucket_bytes": size, "gain": gain},
    }
    return replace(strategy, report=report)


def told_gain(strategy: Strategy) -> float | None:
    """Return the `gain` that `told_buckets` has reported; None if no size was chosen."""
    found = strategy.report.get(_REPORT)
    return None if found is None else float(found["gain"])


def _words(strategy: Strategy) -> str:
    size = strategy.bucket_bytes
    return f"buckets of at most {format_bytes(size)}" if size else "buckets of one tensor"


def _options(request: PlanRequest) -> CompileOptions:
    return request.options or CompileOptions(cluster=request.cluster)


def _least_bytes(error: MemoryLimitError) -> float:
    """Return the memory that a refused plan needs, which the error accepts; infinite if unknown."""
    found = re.search(r"memory_bytes >=? (\d+)", error.accepted)
    return float(found[1]) if found else inf
