"""Pipelines as values: the levels of a machine, the stages that a graph is cut into, their prices.

    levels, innermost first            stages of `replicas` (4, 3), (2, 1), (1, 1), (1, 1)

    level 1: 4 nodes, 1.25e9 B/s       [ node 0 ][ node 1 ][ node 2 ][      node 3     ]
    level 0: 4 devices, 1e10 B/s         0 1 2 3   0 1 2 3   0 1 2 3    0 1    2     3
                                       |- stage 0, 12 replicas ----|  stage 1  2     3
    segment of level 1                 |----------- 0 -------------||------- 1 ------|

Holds no algorithm. `hierarchy` finds such pipelines, `evaluate` prices them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a machine.

    Args:
        components: How many components of the level below it joins (of the lowest: devices).
        bytes_per_s: Bandwidth of the link of one such component, each direction.
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
    """What some devices compute.

    Args:
        blocks: Names, in dependency order.
        replicas: By level, innermost first: so many components of that level each hold a copy of
            the segment of this stage. The product is the number of devices.
        segment: By level, innermost first: the number of the segment of that level which this
            stage is part of; segments of a level are numbered along the pipeline. At level 0 that
            is the number of the stage.
    """

    blocks: tuple[str, ...]
    replicas: tuple[int, ...]
    segment: tuple[int, ...]

    @property
    def num_replicas(self) -> int:
        """Devices of the stage: each holds all of it, and takes each so-many-th micro-batch."""
        return prod(self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """What one stage costs.

    Args:
        compute_s: Forward and backward of one micro-batch on one device.
        sync_s: Summing its gradients, for as many micro-batches as it has replicas.
        boundary_bytes: What crosses to the stages behind it, in one direction.
        transfer_s: That and its gradient, one micro-batch, on the links that share it.
        in_flight: Micro-batches that a device holds at most: begun, and not yet taken back.
        memory_bytes: Parameters, by versions, and activations in flight of a device.
    """

    compute_s: float
    sync_s: float
    boundary_bytes: float
    transfer_s: float
    in_flight: int
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a pipeline costs.

    Args:
        pipeline_s: Time from one micro-batch to the next when the pipeline is full: the largest of
            max(compute_s, sync_s) / replicas and transfer_s of all stages.
        stages: In order.
    """

    pipeline_s: float
    stages: tuple[StagePrice, ...]

    @property
    def memory_bytes(self) -> float:
        """Memory of the device that holds most."""
        return max(stage.memory_bytes for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """That no pipeline is possible.

    Args:
        reason: Why.
        todo: What would make one possible.
        least_memory_bytes: The least limit of memory with which there is a pipeline; None if
            memory is not what is missing.
        blocks: With that limit, what the stage that needs it holds.
    """

    reason: str
    todo: str
    least_memory_bytes: float | None = None
    blocks: tuple[str, ...] = ()


def ring_factor(replicas: int) -> float:
    """Return the bytes that each of some replicas sends to sum one byte with a ring all-reduce."""
    return 2 * (replicas - 1) / replicas


def num_devices(levels: Sequence[Level]) -> int:
    """Return the number of devices of a machine."""
    return prod(level.components for level in levels)
