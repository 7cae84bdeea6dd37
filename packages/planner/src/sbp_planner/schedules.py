"""Choose the schedule of a pipeline (GPipe, 1F1B, ...) for the planners `manual` and `propagate`.

It is the named schedule, or with `auto` the fastest that fits: `auto` infers a strategy for each
schedule that is defined for the mesh and the micro-batches, compiles it, and simulates its plan. Of
the schedules that fit the memory of a device it takes the one with the shortest step; of steps
within a thousandth of that, the one with the least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.errors import ConfigError, MemoryLimitError, PlanError, SbpLookupError
from sbp_core.infer import Pipelined, pipelined
from sbp_core.memory import predict_memory
from sbp_core.pipeline import SCHEDULES
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.configs import AUTO, ManualConfig, PropagateConfig

#: Steps that differ by less than this relative amount are compared by memory.
_NEAR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """A schedule with a plan; `memory_bytes` is of the fullest rank, None if unknown."""

    strategy: Strategy
    step_s: float
    memory_bytes: int | None


def with_schedule(
    request: PlanRequest,
    config: ManualConfig | PropagateConfig,
    propagate: Callable[[Pipelined], Strategy],
) -> Strategy:
    """Return the strategy for the schedule of the config.

    Args:
        request: See `Planner.plan`.
        config: The settings `pipeline`, `chunks` and `stage_ranks`.
        propagate: Returns the strategy for one schedule.

    Raises:
        ConfigError: the schedule is undefined for the mesh and the micro-batches.
        PlanError: no schedule leads to a plan that fits; or see `propagate`.
    """
    if config.pipeline != AUTO:
        stages = _pipelined(request, config, config.pipeline)
        return _named(propagate(stages), stages)
    limit = request.cluster.device.memory_bytes
    tried: dict[str, _Tried] = {}
    for stages in _defined(request, config):
        if request.progress:
            request.progress(f"trying the schedule {stages.name!r}", len(tried) / len(SCHEDULES))
        try:
            strategy = _named(propagate(stages), stages)
            plan = compile_plan(
                request.graph, strategy, request.options or CompileOptions(cluster=request.cluster)
            )
        except PlanError:
            continue  # such as too few blocks for the chunks of the schedule
        tried[stages.name] = _Tried(
            strategy=strategy, step_s=simulate(plan).step_s, memory_bytes=_memory_bytes(plan)
        )
        if len(stages.stages) == 1:
            return strategy
    fits = [one for one in tried.values() if one.memory_bytes is None or one.memory_bytes <= limit]
    if not fits:
        raise MemoryLimitError(
            f"no schedule of the pipeline fits the {format_bytes(limit)} of a device",
            where=[_line(name, one) for name, one in tried.items()],
            accepted="more cluster.memory_bytes, or plans that need less",
            todo="raise trainer.micro_batches, or take more stages",
        )
    least_s = min(one.step_s for one in fits) * (1 + _NEAR)
    best = min((o for o in fits if o.step_s <= least_s), key=lambda o: o.memory_bytes or 0)
    lines = [_line(name, one) for name, one in sorted(tried.items(), key=lambda e: e[1].step_s)]
    told = {
        "explanation": [
            *best.strategy.report.get("explanation", ()),
            f"pipeline: the fastest of what fits is {best.strategy.report['pipeline']}: "
            + "; ".join(lines),
        ]
    }
    return replace(best.strategy, report={**best.strategy.report, **told})


def _pipelined(
    request: PlanRequest, config: ManualConfig | PropagateConfig, name: str
) -> Pipelined:
    return pipelined(
        request.mesh,
        name,
        request.graph.num_micro_batches,
        config.chunks,
        config.stage_ranks,
        num_updates=request.graph.num_updates,
        vertical_sync=config.vertical_sync,
    )


def _defined(request: PlanRequest, config: ManualConfig | PropagateConfig) -> Iterator[Pipelined]:
    """Yield each schedule that is defined for the number of updates in a step."""
    for name in SCHEDULES:
        if name == "2bw":
            continue  # no faster than pipedream, with parameters that are no less stale
        try:
            yield _pipelined(request, config, name)
        except ConfigError:
            continue


def _named(strategy: Strategy, stages: Pipelined) -> Strategy:
    if len(stages.stages) == 1:
        return strategy
    return replace(strategy, report={**strategy.report, "pipeline": stages.name})


def _memory_bytes(plan: PhysicalPlan) -> int | None:
    """Return the memory of the fullest rank; None if no tensor library knows layouts of results."""
    try:
        return predict_memory(plan).peak
    except SbpLookupError:
        return None


def _line(name: str, one: _Tried) -> str:
    size = "" if one.memory_bytes is None else f", {format_bytes(one.memory_bytes)}"
    return f"{name} {format_seconds(one.step_s)}{size}"
