"""Compute the predicted costs of a plan, for the answers of `sbp-plan`: times, traffic, memory.

In JSON (`sbp-plan figures=FILE`), keys end in their units, and unknown values are null:

    {"planner": "ilp", "step_s": 0.0132, "samples_per_s": 606.0, "bound_s": 0.0132, "gap": 0.0,
     "memory": {"limit_bytes": ..., "ranks": {"0": {"peak_bytes": ..., "kinds": {...}}}}, ...}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile import COMMIT, BoxingActor, PhysicalPlan
from sbp_core.graph import graph_hash
from sbp_core.memory import MemoryReport, RankMemory
from sbp_core.simulation import Simulation
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.utilization import ModelWork, num_parameters, samples_of_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Boxing (communication) of one kind over links of one level, in a training step.

    Args:
        kind: The collective, or transfers.
        level: Index in `Cluster.levels` of the smallest level whose groups contain all ranks of the
            step; 0 is the innermost.
        num_calls: Number of calls; a bucket of small tensors counts as one.
        sent_bytes: Bytes that all ranks together send.
        time_s: Sum of the times of the calls, in seconds.
    """

    kind: StepKind
    level: int
    num_calls: int
    sent_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Predicted costs of a step.

    Args:
        step_s: Time of a step, in seconds.
        computing_s, boxing_s: Seconds that a rank computes and communicates; mean over all ranks.
        num_ranks: Ranks of the plan.
        sent_bytes: Bytes that all ranks together send, including the commit of the step.
        traffic: Communication by kind and link, without the commit.
        fullest: Memory of the rank that needs most; None if it is unknown.
        limit_bytes: Memory of a rank.
    """

    step_s: float
    computing_s: float
    boxing_s: float
    num_ranks: int
    sent_bytes: int
    traffic: tuple[Traffic, ...]
    fullest: RankMemory | None
    limit_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the plan fits into memory, as far as that is known."""
        return self.fullest is None or self.fullest.peak <= self.limit_bytes

    def sent_by(self, kind: StepKind) -> float:
        """Return the bytes that a rank sends in steps of a kind; the mean over all ranks."""
        return sum(one.sent_bytes for one in self.traffic if one.kind is kind) / self.num_ranks

    def calls_of(self, kind: StepKind) -> int:
        """Return the number of boxing steps of a kind."""
        return sum(one.num_calls for one in self.traffic if one.kind is kind)


def figures_of(planned: Planned) -> Figures:
    """Return the predicted costs of a plan."""
    plan, simulation, memory = planned.plan, planned.simulation, planned.memory
    cluster = planned.settings.cluster
    computing, boxing = busy_s(plan, simulation)
    num_ranks = len(plan.ranks)
    return Figures(
        step_s=simulation.step_s,
        computing_s=sum(computing.values()) / num_ranks,
        boxing_s=sum(boxing.values()) / num_ranks,
        num_ranks=num_ranks,
        sent_bytes=plan.boxing_bytes,
        traffic=tuple(traffic(plan, cluster)),
        fullest=fullest(memory),
        limit_bytes=cluster.device.memory_bytes,
    )


def fullest(memory: MemoryReport | str) -> RankMemory | None:
    """Return the rank with the highest peak, the first of several; None if it is unknown."""
    if isinstance(memory, str):
        return None
    return max(memory.ranks.values(), key=lambda rank: rank.peak)


def busy_s(plan: PhysicalPlan, simulation: Simulation) -> tuple[dict[int, float], dict[int, float]]:
    """Return for each rank the seconds in which its threads compute, and in which they box."""
    computing = dict.fromkeys((part.rank for part in plan.ranks), 0.0)
    boxing = dict(computing)
    for one in simulation.firings:
        to = boxing if isinstance(one.actor, BoxingActor) else computing
        to[one.rank] += one.free_s - one.start_s
    return computing, boxing


def traffic(plan: PhysicalPlan, cluster: Cluster) -> Iterator[Traffic]:
    """Yield the communication by kind and level, without the commit of the step."""
    calls: dict[int, tuple[int, float]] = {}
    for part in plan.ranks:
        for actor in part.actors:
            if isinstance(actor, BoxingActor) and actor.name != COMMIT:
                calls[actor.step] = actor.num_firings(plan.repetitions), actor.time_s
    found: dict[tuple[StepKind, int], list[tuple[int, int, float]]] = defaultdict(list)
    for index, (count, time_s) in calls.items():
        if size := (step := plan.steps[index]).size_bytes:
            key = step.kind, level_of(step, cluster)
            found[key].append((count, count * size, count * time_s))
    for (kind, level), parts in sorted(found.items(), key=lambda one: (one[0][0].value, one[0][1])):
        num_calls, sent_bytes, times_s = zip(*parts, strict=True)
        yield Traffic(
            kind=kind,
            level=level,
            num_calls=sum(num_calls),
            sent_bytes=sum(sent_bytes),
            time_s=sum(times_s),
        )


def level_of(step: BoxingStep, cluster: Cluster) -> int:
    """Return the index of the smallest level whose groups contain all ranks of a boxing step."""
    (source, _), (target, _) = step.source, step.target
    if step.kind is StepKind.TRANSFER:
        groups: tuple[tuple[int, ...], ...] = ((*source.rank_list, *target.rank_list),)
    else:
        groups = source.groups(*step.axes)
    return max(
        sum(len({rank // size for rank in group}) > 1 for size in cluster.group_sizes)
        for group in groups
    )


def figures_json(planned: Planned) -> dict[str, Any]:
    """Return the predicted costs of a plan as a JSON value."""
    figures, plan, memory = figures_of(planned), planned.plan, planned.memory
    strategy, cluster = planned.strategy, planned.settings.cluster
    work = ModelWork.of(planned.graph, cluster.device, figures.num_ranks)
    samples = samples_of_step(planned.graph)
    reported = {
        name: float(value) if isinstance(value, int | float) else None
        for name in ("bound_s", "gap")
        for value in [strategy.report.get(name)]
    }
    told: dict[str, Any] = {"limit_bytes": figures.limit_bytes, "ranks": None}
    if isinstance(memory, str):
        told["unknown"] = memory
    else:
        told["ranks"] = {
            str(number): {
                "peak_bytes": rank.peak,
                "host_bytes": rank.host_peak,
                "kinds": {kind.value: size for kind, size in rank.kinds.items()},
            }
            for number, rank in sorted(memory.ranks.items())
        }
    return {
        "planner": strategy.planner,
        "graph_hash": graph_hash(planned.graph),
        "plan_hash": plan.hash,
        "cluster": cluster.name,
        "num_ranks": figures.num_ranks,
        "micro_batches": plan.num_micro_batches,
        "num_parameters": num_parameters(planned.graph),
        "stages": [
            {
                "ranks": list(stage.rank_list),
                "mesh": dict(zip(stage.axes, stage.mesh_shape, strict=True)),
            }
            for stage in strategy.stages
        ],
        "step_s": figures.step_s,
        "period_s": planned.checked.period_s,
        "samples_per_s": samples / figures.step_s if samples and figures.step_s else None,
        "model_flop": work.flop,
        "mfu": work.mfu(figures.step_s) if figures.step_s else None,
        "computing_s": figures.computing_s,
        "boxing_s": figures.boxing_s,
        **reported,
        "sent_bytes": figures.sent_bytes,
        "traffic": [
            {
                "collective": one.kind.value,
                "within": cluster.levels[one.level].name,
                "calls": one.num_calls,
                "sent_bytes": one.sent_bytes,
                "time_s": one.time_s,
            }
            for one in figures.traffic
        ],
        "memory": told,
    }
