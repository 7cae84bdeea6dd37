"""Compute the cost of given pipeline stages on a machine with several levels of links (`evaluate`).

    levels, innermost first            stages of `replicas` (4, 3), (2, 1), (1, 1), (1, 1)

    level 1: 4 nodes, 1.25e9 B/s       [ node 0 ][ node 1 ][ node 2 ][      node 3     ]
    level 0: 4 devices, 1e10 B/s         0 1 2 3   0 1 2 3   0 1 2 3    0 1    2     3
                                       |- stage 0, 12 replicas ----|  stage 1  2     3
    segment of level 1                 |----------- 0 -------------||------- 1 ------|

`hierarchy` finds the best such pipeline by a recurrence, and takes its final costs from here:

    time of a stage         max(c, s_0, r_0 s_1, r_0 r_1 s_2, ...) / (r_0 r_1 r_2 ...)
                            c     forward and backward of its blocks
                            r_k   its replicas at level k
                            s_k   2 (r_k - 1) / r_k * (parameters of its segment of level k) / B_k
    transfer at a boundary  2 a / (B_k min(r_k, r'_k)) / (r_{k+1} r_{k+2} ...)
                            a     bytes across it, each value once, however far it goes
                            k     highest level at which the stages next to it differ in segment
    in flight               n = ceil(devices of this and all later stages / devices of this stage)
    memory of a device      versions(n) * parameters + n * activations

An all-reduce overlaps with the computation of the next micro-batches, so there is a maximum and no
sum. A segment that is replicated at level k takes r_k micro-batches at a time and sums its
gradients once for these. If it is replicated inside as well, that is r_0 ... r_{k-1} times as often
as needed, as in the recurrence of the paper. A value and its gradient have the same size, hence
2 a. They share the links of the replicas on either side, so the side with fewer counts. 1F1B with
round robin over replicas admits micro-batches as in the third line.

Source: Narayanan et al., "PipeDream", SOSP 2019, sections 3.1 to 3.3 (recurrence, 1F1B-RR, weight
stashing), with the all-reduce of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import ceil, fsum, prod

from sbp_core.errors import SbpValueError
from sbp_planner.stages.graph import BlockGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLevel:
    """One level of a machine.

    Args:
        components: Number of components of the level below in one component (lowest: devices).
        bytes_per_s: Bandwidth of the link of one such component, in each direction.
    """

    components: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.components < 1 or not self.bytes_per_s > 0:
            raise SbpValueError(
                f"{self} is no level", accepted="components >= 1 and bytes_per_s > 0"
            )


class WeightVersions(Enum):
    """How many versions of its parameters a stage holds when n micro-batches are in flight."""

    STASHED = "stashed"  #: n, as in PipeDream: backward uses the version of its forward
    DOUBLE = "double"  #: min(n, 2), as in PipeDream-2BW
    SINGLE = "single"  #: 1, as in pipelines that are flushed

    def count(self, in_flight: int) -> int:
        """Return the versions of a stage with so many micro-batches in flight."""
        if self is WeightVersions.STASHED:
            return in_flight
        return min(in_flight, 2) if self is WeightVersions.DOUBLE else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The work of some devices.

    Args:
        blocks: Names, in dependency order.
        replicas: By level, innermost first: the number of components of that level that each hold a
            copy of the segment of this stage. The product is the number of devices.
        segment: By level, innermost first: the number of the segment of that level which contains
            this stage. Segments of a level are numbered along the pipeline; at level 0 it is the
            number of the stage.
    """

    blocks: tuple[str, ...]
    replicas: tuple[int, ...]
    segment: tuple[int, ...]

    @property
    def num_replicas(self) -> int:
        """Devices of the stage: each holds all of it; they take micro-batches in turn."""
        return prod(self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """The cost of one stage.

    Args:
        compute_s: Seconds of forward and backward of one micro-batch on one device.
        sync_s: Seconds to sum its gradients, for as many micro-batches as it has replicas.
        boundary_bytes: Bytes that cross to the next stages, in one direction.
        transfer_s: Seconds for these and their gradients, one micro-batch, on the shared links.
        in_flight: Most micro-batches that a device has begun and not finished.
        memory_bytes: Bytes of parameters, by versions, and activations in flight of a device.
    """

    compute_s: float
    sync_s: float
    boundary_bytes: float
    transfer_s: float
    in_flight: int
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """The cost of a pipeline.

    Args:
        pipeline_s: Time from one micro-batch to the next when the pipeline is full: the largest of
            max(compute_s, sync_s) / replicas and transfer_s of all stages.
        stages: The cost of each stage, in order.
    """

    pipeline_s: float
    stages: tuple[StagePrice, ...]

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest device."""
        return max(stage.memory_bytes for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """The reason why no pipeline is possible.

    Args:
        reason: The reason.
        todo: A change that would make one possible.
        least_memory_bytes: The least limit of memory that allows a pipeline; None if memory is not
            the reason.
        blocks: With that limit, the blocks of the stage that needs it.
    """

    reason: str
    todo: str
    least_memory_bytes: float | None = None
    blocks: tuple[str, ...] = ()


def ring_factor(replicas: int) -> float:
    """Return the bytes that each of some replicas sends to all-reduce one byte over a ring."""
    return 2 * (replicas - 1) / replicas


def num_devices(levels: Sequence[MachineLevel]) -> int:
    """Return the number of devices of a machine."""
    return prod(level.components for level in levels)


def evaluate(
    graph: BlockGraph,
    levels: Sequence[MachineLevel],
    stages: Sequence[Stage],
    versions: WeightVersions = WeightVersions.STASHED,
) -> PipelineCost:
    """Return the cost of a pipeline.

    Args:
        graph: The blocks.
        levels: The machine, innermost level first.
        stages: The stages of the pipeline, in order.
        versions: How many versions of its parameters a stage holds.

    Raises:
        SbpValueError: The stages are no pipeline of that graph on that machine: a block is missing,
            there twice, or before a block that it uses; or a device is unused or used twice.
    """
    _check_blocks(graph, stages)
    _check_devices(levels, stages)
    block_of = {block.name: block for block in graph.blocks}
    parameters = [fsum(block_of[name].parameter_bytes for name in s.blocks) for s in stages]
    done: set[str] = set()
    prices: list[StagePrice] = []
    times: list[float] = []
    for at, stage in enumerate(stages):
        done.update(stage.blocks)
        own = [block_of[name] for name in stage.blocks]
        compute_s = fsum(block.compute_s for block in own)
        sync_s = max(
            prod(stage.replicas[:k])
            * ring_factor(stage.replicas[k])
            * fsum(
                size
                for other, size in zip(stages, parameters, strict=True)
                if other.segment[k] == stage.segment[k]
            )
            / level.bytes_per_s
            for k, level in enumerate(levels)
        )
        boundary_bytes = fsum(
            flow.num_bytes
            for flow in graph.flows
            if flow.producer in done and not done.issuperset(flow.consumers)
        )
        transfer_s = 0.0
        if at + 1 < len(stages):
            after = stages[at + 1]
            k = max(k for k in range(len(levels)) if stage.segment[k] != after.segment[k])
            rate = levels[k].bytes_per_s * min(stage.replicas[k], after.replicas[k])
            transfer_s = 2 * boundary_bytes / rate / prod(stage.replicas[k + 1 :])
        later = sum(other.num_replicas for other in stages[at:])
        in_flight = ceil(later / stage.num_replicas)
        prices.append(
            StagePrice(
                compute_s=compute_s,
                sync_s=sync_s,
                boundary_bytes=boundary_bytes,
                transfer_s=transfer_s,
                in_flight=in_flight,
                memory_bytes=versions.count(in_flight) * parameters[at]
                + in_flight * fsum(block.activation_bytes for block in own),
            )
        )
        times += [max(compute_s, sync_s) / stage.num_replicas, transfer_s]
    return PipelineCost(pipeline_s=max(times), stages=tuple(prices))


def data_parallel(graph: BlockGraph, levels: Sequence[MachineLevel]) -> PipelineCost:
    """Return the cost of one stage on all devices."""
    stage = Stage(
        blocks=graph.names((1 << len(graph.blocks)) - 1),
        replicas=tuple(level.components for level in levels),
        segment=(0,) * len(levels),
    )
    return evaluate(graph, levels, [stage])


def _check_blocks(graph: BlockGraph, stages: Sequence[Stage]) -> None:
    stage_of: dict[str, int] = {}
    for at, stage in enumerate(stages):
        for name in stage.blocks:
            if name not in graph.index or name in stage_of:
                held = "twice in the pipeline" if name in stage_of else "no block of the graph"
                raise SbpValueError(f"{name!r} is {held}", where=f"stage {at}")
            stage_of[name] = at
    missing = [name for name in graph.index if name not in stage_of]
    if missing:
        raise SbpValueError(f"no stage holds {missing[0]!r}", accepted="every block in one stage")
    for flow in graph.flows:
        for name in flow.consumers:
            if stage_of[name] < stage_of[flow.producer]:
                raise SbpValueError(
                    f"{name!r} uses {flow.producer!r}, which a later stage makes",
                    where=f"stage {stage_of[name]}",
                )


def _check_devices(levels: Sequence[MachineLevel], stages: Sequence[Stage]) -> None:
    """Raise unless every level is filled, and the numbers of segments are nested."""
    for k in range(len(levels)):
        # Within a segment of the level above, the segments of this level share its components.
        above = [stage.segment[k + 1 :] for stage in stages]
        for parent in set(above):
            inside = [stage for stage, own in zip(stages, above, strict=True) if own == parent]
            counts = {stage.segment[k]: stage.replicas[k:] for stage in inside}
            same = all(counts[stage.segment[k]] == stage.replicas[k:] for stage in inside)
            if not same or sum(own[0] for own in counts.values()) != levels[k].components:
                raise SbpValueError(
                    f"the segments of level {k} have {[own[0] for own in counts.values()]} "
                    f"components, of {levels[k].components}",
                    accepted="as many as there are, shared by stages of one segment",
                )
    for one, other in pairwise(stages):
        steps = [b - a for a, b in zip(one.segment, other.segment, strict=True)]
        if steps[0] != 1 or any(not 0 <= up <= down for down, up in pairwise(steps)):
            raise SbpValueError(
                f"segments {one.segment} and {other.segment} do not follow each other"
            )
