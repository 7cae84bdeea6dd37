"""What a plan costs, in figures that two plans can be compared by."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile import COMMIT, BoxingActor, PhysicalPlan
from sbp_core.memory import MemoryReport, RankMemory
from sbp_core.simulate import Simulation
from sbp_launch.planning.flow import Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Boxing of one kind over links of one level, in a training step.

    Args:
        kind: The collective, or transfers.
        level: Of `Cluster.levels`, the number of the smallest whose groups hold those that talk: 0
            is the innermost.
        num_calls: How often, buckets of small tensors being one.
        sent_bytes: What all ranks together send.
        time_s: What the calls take one after the other, in seconds.
    """

    kind: StepKind
    level: int
    num_calls: int
    sent_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a step of a plan costs.

    Args:
        step_s: Predicted time of a step, in seconds.
        computing_s, boxing_s: For how long a thread computes and boxes, in the mean of all ranks.
        num_ranks: Ranks of the plan.
        sent_bytes: What all ranks together send, the commit of the step included.
        traffic: The same by kind and link, without the commit.
        fullest: The memory of the rank that needs most; None if it is not known.
        limit_bytes: The memory that a rank has.
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
        """Whether every rank fits its memory, as far as that is known."""
        return self.fullest is None or self.fullest.peak <= self.limit_bytes

    def sent_by(self, kind: StepKind) -> int:
        """Return what all ranks together send in steps of a kind, in bytes."""
        return sum(one.sent_bytes for one in self.traffic if one.kind is kind)

    def calls_of(self, kind: StepKind) -> int:
        """Return how many boxing steps of a kind there are."""
        return sum(one.num_calls for one in self.traffic if one.kind is kind)


def figures_of(planned: Planned) -> Figures:
    """Return what a plan costs."""
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
    """Return the rank that needs most, the first of several; None if that is not known."""
    if isinstance(memory, str):
        return None
    return max(memory.ranks.values(), key=lambda rank: rank.peak)


def busy_s(plan: PhysicalPlan, simulation: Simulation) -> tuple[dict[int, float], dict[int, float]]:
    """Return for how long the threads of each rank compute, and for how long they box."""
    computing = dict.fromkeys((part.rank for part in plan.ranks), 0.0)
    boxing = dict(computing)
    for one in simulation.firings:
        to = boxing if isinstance(one.actor, BoxingActor) else computing
        to[one.rank] += one.free_s - one.start_s
    return computing, boxing


def traffic(plan: PhysicalPlan, cluster: Cluster) -> Iterator[Traffic]:
    """Yield the boxing between ranks by kind and level, without the commit of the step."""
    calls: dict[int, tuple[int, float]] = {}
    for part in plan.ranks:
        for actor in part.actors:
            if isinstance(actor, BoxingActor) and actor.name != COMMIT:
                calls[actor.step] = actor.num_firings(plan.repetitions), actor.time_s
    counts: Counter[tuple[StepKind, int]] = Counter()
    sizes: Counter[tuple[StepKind, int]] = Counter()
    times_s: dict[tuple[StepKind, int], float] = defaultdict(float)
    for index, (count, time_s) in calls.items():
        step = plan.steps[index]
        if step.size_bytes:
            key = step.kind, level_of(step, cluster)
            counts[key] += count
            sizes[key] += count * step.size_bytes
            times_s[key] += count * time_s
    for kind, level in sorted(counts, key=lambda key: (key[0].value, key[1])):
        key = kind, level
        yield Traffic(
            kind=kind,
            level=level,
            num_calls=counts[key],
            sent_bytes=sizes[key],
            time_s=times_s[key],
        )


def level_of(step: BoxingStep, cluster: Cluster) -> int:
    """Return the number of the smallest level whose groups hold those that talk in a step."""
    (source, _), (target, _) = step.source, step.target
    if step.kind is StepKind.TRANSFER:
        groups: tuple[tuple[int, ...], ...] = ((*source.rank_list, *target.rank_list),)
    else:
        groups = source.groups(*step.axes)
    return max(
        sum(len({rank // size for rank in group}) > 1 for size in cluster.group_sizes)
        for group in groups
    )


def memory_kinds(memory: RankMemory | None) -> Mapping[str, int]:
    """Return the bytes of each kind at the peak of a rank, by name; nothing if it is not known."""
    return {} if memory is None else {kind.value: size for kind, size in memory.kinds.items()}
