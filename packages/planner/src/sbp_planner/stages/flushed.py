"""Cut a model into pipeline stages for a schedule with a flush: m micro-batches, then one update.

The planners `gpipe` and `pipedream` use it; `alpa` prices the resulting stages first. The schedule
is GPipe's or 1F1B's. All devices of a stage share each micro-batch. They are a range of the
machine's devices: stages may end anywhere, also inside a node. For one micro-batch

    stage on r devices     max(c / r, s / m)     gradients are summed once a step, overlapped
    transfer at a cut      2 a / (B_k l)
    memory of a device     P + n A / r

    c   forward and backward of its blocks        P, A   bytes of its parameters and activations
    s   ring all-reduce: the largest, over the levels k, of 2 (q_k - 1) / q_k * P / B_k, where q_k
        components of one and the same component are in the range of the stage
    a   bytes across the cut     k   highest level at which the devices on either side differ
    l   components of level k in the range before or after the cut, whichever are fewer
    n   micro-batches in flight: all m with GPipe, as many as stages from here on with 1F1B

The step takes (m - 1) max + sum of these (`table` solves that exactly).

Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "Memory-Efficient Pipeline-Parallel
DNN Training", ICML 2021 (PipeDream-Flush, 1F1B inside a step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf, prod

import numpy as np
import numpy.typing as npt

from sbp_core.errors import SbpValueError
from sbp_planner.stages.graph import BlockGraph
from sbp_planner.stages.ideals import Ideals, order_ideals
from sbp_planner.stages.pipeline import MachineLevel, StagePrice, num_devices, ring_factor
from sbp_planner.stages.table import InFlightLimits, TableProblem, cut_table

Floats = npt.NDArray[np.float64]

#: The time of a pass grows with the square of the number of ideals.
_MOST_IDEALS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedProblem:
    """A graph to cut, and the machine.

    Args:
        graph: The blocks; their costs are for one micro-batch on one device.
        levels: The machine, innermost level first.
        micro_batches: The number m.
        in_flight: `STAGES` for 1F1B, `ALL` for GPipe.
        memory_bytes: Memory of a device; infinite if memory does not count.
        device_counts: Allowed numbers of devices of a stage; None for any number.
        num_stages: Required number of stages; None for any number.
        max_ideals: Limit of the ideals that are considered.
    """

    graph: BlockGraph
    levels: tuple[MachineLevel, ...]
    micro_batches: int
    in_flight: InFlightLimits = InFlightLimits.STAGES
    memory_bytes: float = inf
    device_counts: tuple[int, ...] | None = None
    num_stages: int | None = None
    max_ideals: int = _MOST_IDEALS

    def __post_init__(self) -> None:
        if not self.levels:
            raise SbpValueError("a machine without levels", accepted="one level or more")
        if self.in_flight is InFlightLimits.ROUND_ROBIN:
            raise SbpValueError(
                "devices of a flushed stage share each micro-batch; they do not take turns",
                accepted="InFlightLimits.STAGES or InFlightLimits.ALL",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedStage(StagePrice):
    """The work of some devices, and its cost for one micro-batch.

    Its `compute_s` is c / r, and its `sync_s` is s / m.

    Args:
        blocks: Names, in dependency order.
        devices: Number of devices; they follow the devices of the previous stage.
    """

    blocks: tuple[str, ...]
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedPlan:
    """The best pipeline.

    Args:
        stages: All stages, in order.
        step_s: Time of a step: (m - 1) max + sum.
        slowest_s: The largest time of a stage or a transfer, for one micro-batch.
        complete: Whether all order ideals were considered.
        num_ideals: How many order ideals were considered.
        family: The name of their family, for people.
    """

    stages: tuple[FlushedStage, ...]
    step_s: float
    slowest_s: float
    complete: bool
    num_ideals: int
    family: str


def cut_flushed(problem: FlushedProblem) -> FlushedPlan | None:
    """Return the pipeline with the shortest step; None if none fits."""
    ideals = order_ideals(problem.graph, problem.max_ideals)
    table = TableProblem(
        num_places=len(ideals.masks),
        devices=num_devices(problem.levels),
        seconds=_seconds(problem, ideals),
        device_counts=problem.device_counts,
        transfer_s=partial(transfer_s, problem.levels, ideals),
        memory=None if problem.memory_bytes == inf else partial(_memory, ideals),
        memory_bytes=problem.memory_bytes,
        in_flight=problem.in_flight,
        micro_batches=problem.micro_batches,
        num_stages=problem.num_stages,
    )
    plan = cut_table(table)
    if plan is None:
        return None
    stages = []
    for stage, behind, count in table.walk(plan.stages):
        start, stop, own = stage.start, stage.stop, stage.devices
        in_flight = table.held(own, behind, count)
        parameters = ideals.parameter_bytes[stop] - ideals.parameter_bytes[start]
        sync_s = _sync_factor(problem.levels, own, behind) * parameters / problem.micro_batches
        after = plan.stages[-count + 1].devices
        transfers = transfer_s(problem.levels, ideals, own, after, behind) if behind else None
        stages.append(
            FlushedStage(
                blocks=problem.graph.names(ideals.masks[stop] & ~ideals.masks[start]),
                devices=own,
                compute_s=float(ideals.compute_s[stop] - ideals.compute_s[start]) / own,
                sync_s=float(sync_s),
                boundary_bytes=float(ideals.crossing_bytes[stop]),
                transfer_s=0.0 if transfers is None else float(transfers[stop]),
                in_flight=in_flight,
                memory_bytes=float(_memory(ideals, own, in_flight)[start, stop]),
            )
        )
    return FlushedPlan(
        stages=tuple(stages),
        step_s=plan.objective_s,
        slowest_s=plan.slowest_s,
        complete=ideals.complete,
        num_ideals=len(ideals.masks),
        family=ideals.family,
    )


def _seconds(problem: FlushedProblem, ideals: Ideals) -> Callable[[int, int], Floats]:
    """Return the function for times of stages: (their devices, all devices after) -> (S, S)."""
    compute = ideals.inside(ideals.compute_s)
    parameters = ideals.inside(ideals.parameter_bytes)

    @lru_cache(maxsize=64)
    def priced(own: int, factor: float) -> Floats:
        if not factor:
            return compute / own
        return np.maximum(compute / own, factor * parameters / problem.micro_batches)

    return lambda own, behind: priced(own, _sync_factor(problem.levels, own, behind))


def _sync_factor(levels: Sequence[MachineLevel], own: int, behind: int) -> float:
    """Return the seconds for a stage to all-reduce one byte of gradients."""
    stop = num_devices(levels) - behind
    pairs = zip(_touched(levels, stop - own, stop), levels, strict=True)
    return max(ring_factor(count) / level.bytes_per_s for count, level in pairs)


def transfer_s(
    levels: Sequence[MachineLevel], ideals: Ideals, own: int, after: int, behind: int
) -> Floats:
    """Return the seconds of the transfers at each place for one micro-batch, float (S,).

    Args:
        levels: The machine, innermost first.
        ideals: The places.
        own: Number of devices of the stage before the cut.
        after: Number of devices of the stage after the cut.
        behind: Number of all devices after the cut.
    """
    cut = num_devices(levels) - behind
    sizes = [prod(level.components for level in levels[:k]) for k in range(len(levels))]
    k = max(k for k, size in enumerate(sizes) if (cut - 1) // size != cut // size)
    before, beyond = (
        (stop - 1) // sizes[k] - start // sizes[k] + 1
        for start, stop in ((cut - own, cut), (cut, cut + after))
    )
    return 2 * ideals.crossing_bytes / (levels[k].bytes_per_s * min(before, beyond))


def _memory(ideals: Ideals, own: int, in_flight: int) -> Floats:
    activations = ideals.inside(ideals.activation_bytes) / own
    return ideals.inside(ideals.parameter_bytes) + in_flight * activations


def _touched(levels: Sequence[MachineLevel], start: int, stop: int) -> Iterator[int]:
    """Yield, level by level, how many components of one component a range has devices in."""
    size = 1
    for level in levels:
        above = size * level.components
        yield max(
            (min(stop, parent + above) - 1) // size - max(start, parent) // size + 1
            for parent in range(start // above * above, stop, above)
        )
        size = above
