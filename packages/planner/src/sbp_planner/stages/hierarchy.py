"""Cut a graph into replicated pipeline stages, exactly, for a machine with several levels of links.

This is PipeDream's search, for the command `python -m sbp_planner.pipedream`. An order ideal is a
set of blocks that contains all predecessors of each: a place where a graph can be cut.

    minimise    the slowest stage or transfer            (`evaluate` says what these take)
    over        chains of order ideals, replicas of each stage at each level
    such that   every device is used once, and memory of each stage <= the limit

Level k joins n_k components of the level below. Take a segment (the blocks between two ideals
i < j) on m of them in parallel, followed inside its component by s others:

    T_k(i, j, m, c) = max(A_{k-1}(i, j, ceil(c / m)), 2 (m-1)/m * (P_j - P_i) / B_k) / m
    F_k(i, j, m, c) = min of T_k(i, j, m, c)
                      and over e, r of max(T_k(i, e, r, c + (m - r) d_k), F_k(e, j, m - r, c),
                                           2 a_e / B_k / (replicas on the side with fewer))
    A_k(i, j, c)    = F_k(i, j, n_k, c),    A_{-1} = compute time of the segment

    d_k   devices of a component             P   parameters of the blocks in an ideal
    c     devices that come after, for each  a   bytes across an ideal
          component

The released optimizer charges memory for the micro-batches in flight minus one. How many are in
flight depends on the stages after it, also after the component. c carries this down, and is why the
recurrence runs from the last stage to the first. If c devices come after m components, ceil(c / m)
come after each, and ceil(ceil(c / m) / r) = ceil(c / (m r)), so nothing is lost. Each c has a
separate table. There are few, because c is a multiple of components (4 x 4 devices: 0, 2, 4, 8,
12). Without a limit there is one.

The transfer at e is charged to the stages on both sides, to each divided by its number of replicas,
which is the division by the smaller number.

With a matrix of bytes in place of times, the same search finds the least limit of memory.

Complexity: S ideals; at the outermost level O(S^2 n^2), at the levels inside O(S^3 n^2 / 12) for
each c; vectorised. Memory O(S^2 n).

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1; msr-fiddle/pipedream, optimizer/optimizer_graph_hierarchical.py (the released program;
its faults are not reproduced).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sbp_core.errors import SbpValueError
from sbp_core.units import format_bytes
from sbp_planner.stages.graph import BlockGraph
from sbp_planner.stages.ideals import Ideals, order_ideals
from sbp_planner.stages.pipeline import (
    Infeasible,
    MachineLevel,
    PipelineCost,
    Stage,
    WeightVersions,
    evaluate,
    num_devices,
    ring_factor,
)

#: How many steps the search may take, which limits the number of ideals.
_WORK = 2e10

#: The number of ideals is never below the first and never above the second.
_FEWEST_IDEALS, _MOST_IDEALS = 300, 4000

#: Rows of a table, and of the right matrix of a product, that are worked on at a time, so that the
#: data stay in the processor's cache.
_ROWS, _PRODUCT_ROWS = 32, 64

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Rows and columns of a table.
_Window: TypeAlias = tuple[slice, slice]
_ALL: _Window = (slice(None), slice(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyProblem:
    """A graph to cut, and the machine.

    Args:
        graph: The blocks.
        levels: The machine, innermost level first; at least one.
        memory_bytes: Memory of a device; None if memory does not count.
        replicate: Whether stages may have replicas; without, each device is a stage.
        idle: Whether devices may be left out, equally many in each component of a level.
        versions: How many versions of its parameters a stage holds.
        max_ideals: Limit of the ideals that are considered; None for well under a minute of work.
    """

    graph: BlockGraph
    levels: tuple[MachineLevel, ...]
    memory_bytes: float | None = None
    replicate: bool = True
    idle: bool = False
    versions: WeightVersions = WeightVersions.STASHED
    max_ideals: int | None = None

    def __post_init__(self) -> None:
        if not self.levels:
            raise SbpValueError("a machine without levels", accepted="one level or more")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise SbpValueError(
                f"memory of {self.memory_bytes} bytes", accepted="more than 0, or None"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyPlan:
    """The best pipeline.

    Args:
        levels: The used part of the machine: smaller than the machine only with `idle`.
        stages: All stages, in order.
        evaluation: Their cost by `evaluate`.
        complete: Whether all order ideals were considered, so that no pipeline is better.
        num_ideals: How many order ideals were considered.
        family: The name of their family, for people.
        bound_s: No pipeline is faster; equal to the time if all ideals were considered.
        searched_s: The time by the recurrence of the search, for tests.
    """

    levels: tuple[MachineLevel, ...]
    stages: tuple[Stage, ...]
    evaluation: PipelineCost
    complete: bool
    num_ideals: int
    family: str
    bound_s: float
    searched_s: float


def cut_hierarchy(problem: HierarchyProblem) -> HierarchyPlan | Infeasible:
    """Return the pipeline whose slowest stage or transfer is fastest, or why there is none."""
    limit = problem.max_ideals if problem.max_ideals is not None else _affordable_ideals(problem)
    ideals = order_ideals(problem.graph, limit)
    few = ideals.some(_FEWEST_IDEALS) if len(ideals.masks) > _FEWEST_IDEALS else None
    best: tuple[float, tuple[MachineLevel, ...], list[Stage]] | None = None
    for levels in _machines(problem):
        if best is not None and ideals.compute_s[-1] / num_devices(levels) >= best[0]:
            continue  # even if all devices were busy all the time
        found = _best_on(replace(problem, levels=levels), ideals, few)
        if found is not None and (best is None or found[0] < best[0]):
            best = found[0], levels, found[1]
    if best is None:
        return _why_infeasible(problem, ideals)
    value, levels, stages = best
    evaluation = evaluate(problem.graph, levels, stages, problem.versions)
    bound_s = float(ideals.compute_s[-1]) / num_devices(problem.levels)
    return HierarchyPlan(
        levels=levels,
        stages=tuple(stages),
        evaluation=evaluation,
        complete=ideals.complete,
        num_ideals=len(ideals.masks),
        family=ideals.family,
        bound_s=evaluation.pipeline_s if ideals.complete else bound_s,
        searched_s=value,
    )


def _best_on(
    problem: HierarchyProblem, ideals: Ideals, few: Ideals | None
) -> tuple[float, list[Stage]] | None:
    """Return the least time on all devices, and the pipeline; None if none is possible.

    A first search over `few` of the ideals gives a bound for the search over all.
    """
    if problem.memory_bytes is not None:
        # Without the limit there is one table for each level, and its best pipeline often fits.
        roomy = _best_on(replace(problem, memory_bytes=None), ideals, few)
        if roomy is None:
            return None
        price = evaluate(problem.graph, problem.levels, roomy[1], problem.versions)
        if price.memory_bytes <= problem.memory_bytes:
            return roomy
        # Another one may be as fast and fit; with this bound, the search is quick.
        search = _Search(problem, ideals, bound=roomy[0])
        found = search.best()
        if found is not None:
            return found, search.stages()
    reached = _Search(problem, few).best() if few is not None else None
    search = _Search(problem, ideals, bound=inf if reached is None else reached)
    found = search.best()
    return None if found is None else (found, search.stages())


def _machines(problem: HierarchyProblem) -> Iterator[tuple[MachineLevel, ...]]:
    """Yield the machine; if devices may be idle, the smaller ones too, large ones first."""
    if not problem.idle:
        yield problem.levels
        return
    counts = product(*(range(1, level.components + 1) for level in problem.levels))
    for own in sorted(counts, key=lambda own: (-prod(own), own)):
        yield tuple(
            replace(level, components=n) for level, n in zip(problem.levels, own, strict=True)
        )


def _affordable_ideals(problem: HierarchyProblem) -> int:
    """Return how many ideals the search can look at in the steps that it may take."""
    pairs = [
        level.components * (level.components + 1) / 2 if problem.replicate else level.components
        for level in problem.levels
    ]
    tables = 1 if problem.memory_bytes is None else 4  # about as many values of c occur
    inner = sum(pairs[:-1]) * tables
    most = min((_WORK / 6 / pairs[-1]) ** 0.5, (6 * _WORK / inner) ** (1 / 3) if inner else inf)
    return int(min(max(most, _FEWEST_IDEALS), _MOST_IDEALS))


def _why_infeasible(problem: HierarchyProblem, ideals: Ideals) -> Infeasible:
    """Return what is missing: memory, if any pipeline uses all these devices, or places to cut."""
    devices = num_devices(problem.levels)
    least: tuple[float, _Search] | None = None
    for levels in _machines(problem):
        own = replace(problem, levels=levels, memory_bytes=None)
        search = _Search(own, ideals, least_memory=True)
        needed = search.best()
        if needed is not None and (least is None or needed < least[0]):
            least = needed, search
    if least is None:
        return Infeasible(
            reason=f"{devices} devices need as many stages without replicas, and "
            f"{len(problem.graph.blocks)} blocks cannot be cut into so many on these levels",
            todo="fewer devices, replicas, or leave devices idle",
        )
    needed, search = least
    stages = search.stages()
    prices = evaluate(problem.graph, search.levels, stages, problem.versions).stages
    at = max(range(len(stages)), key=lambda n: prices[n].memory_bytes)
    assert problem.memory_bytes is not None
    return Infeasible(
        reason=f"no pipeline on {devices} devices fits {format_bytes(problem.memory_bytes)} each: "
        f"the least needs {format_bytes(needed)}, on stage {at + 1} of {len(stages)} "
        f"({stages[at].blocks[0]} to {stages[at].blocks[-1]}, {stages[at].num_replicas} replicas, "
        f"{prices[at].in_flight} micro-batches in flight)",
        todo=f"memory of {ceil(needed)} bytes or more, smaller micro-batches, or more devices",
        least_memory_bytes=needed,
        blocks=stages[at].blocks,
    )


class _Search:
    """The recurrence of the module, for one machine.

    Args:
        problem: The problem; `idle` and `max_ideals` are ignored.
        ideals: Where the graph can be cut.
        least_memory: Minimise the largest memory of a stage instead of time.
        bound: Seconds; slower pipelines are not looked for.
    """

    def __init__(
        self,
        problem: HierarchyProblem,
        ideals: Ideals,
        *,
        least_memory: bool = False,
        bound: float = inf,
    ) -> None:
        self.levels = problem.levels
        self._problem = problem
        self._ideals = ideals
        self._least_memory = least_memory
        # By level: time on one component, which its copies divide; longer ones exceed the bound.
        copies = [
            prod(level.components for level in self.levels[k + 1 :])
            for k in range(len(problem.levels))
        ]
        self._bounds = [bound * (1 + 1e-9) * own for own in copies]
        self._compute = ideals.inside(ideals.compute_s)
        self._parameters = ideals.inside(ideals.parameter_bytes)
        self._activations = ideals.inside(ideals.activation_bytes)
        # The time of a value and its gradient across each ideal, on one link; (S,) by level.
        self._transfers = [
            2 * (0.0 if least_memory else 1.0) * ideals.crossing_bytes / level.bytes_per_s
            for level in self.levels
        ]
        # The devices after a stage matter only if memory does.
        self._counts_after = least_memory or problem.memory_bytes is not None
        self._tables: dict[tuple[int, int], Floats] = {}

    def best(self) -> float | None:
        """Return the least value of the objective; None if no pipeline keeps to the bound."""
        top = len(self.levels) - 1
        best, _, _ = self._columns(top, 0, len(self._ideals.masks) - 1)
        value = float(best[-1, 0])
        # A result above the bound need not be the best.
        return value if value < inf and value <= self._bounds[top] else None

    def stages(self) -> list[Stage]:
        """Return the stages of the best pipeline."""
        found: list[Stage] = []
        top = len(self.levels) - 1
        self._walk(top, 0, (0, len(self._ideals.masks) - 1), (), (), found)
        return found

    def _walk(
        self,
        level: int,
        after: int,
        segment: tuple[int, int],
        replicas: tuple[int, ...],
        numbers: tuple[int, ...],
        found: list[Stage],
    ) -> None:
        """Append the stages of one segment.

        Args:
            level: Level of the component; -1 for a device.
            after: Number of devices after the segment, for each component.
            segment: Its first and last ideal.
            replicas: Replicas at the levels above.
            numbers: Numbers of the segments, at the levels above, that contain it.
            found: Stages before it; its stages are appended.
        """
        start, end = segment
        masks = self._ideals.masks
        if level < 0:
            blocks = self._problem.graph.names(masks[end] & ~masks[start])
            found.append(Stage(blocks=blocks, replicas=replicas, segment=numbers))
            return
        _, counts, stops = self._columns(level, after, end)
        left = self.levels[level].components
        while left:
            count, stop = int(counts[left, start]), int(stops[left, start])
            left -= count
            behind = after + left * num_devices(self.levels[:level])
            number = found[-1].segment[level] + 1 if found else 0
            self._walk(
                level - 1,
                ceil(behind / count),
                (start, stop),
                (count, *replicas),
                (number, *numbers),
                found,
            )
            start = stop

    def _columns(self, level: int, after: int, end: int) -> tuple[Floats, Ints, Ints]:
        """Return F(i, end, m) for all i and m, and the first segment that attains it.

        Rows of i are taken in blocks, the last ones first, so that the data stay in the processor's
        cache: a row depends only on later rows, and fewer components.

        Returns:
            Float (n + 1, S), with the transfer into i except for m = n, which begins the component;
            infinite for m = 0. Int (n + 1, S), components of the first segment, and where it ends.
        """
        total = self.levels[level].components
        transfer = self._transfers[level]
        shape = total + 1, len(self._ideals.masks)
        best = np.full(shape, inf)
        counts, stops = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for low in range(end // _ROWS * _ROWS, -1, -_ROWS):
            rows, columns = slice(low, min(low + _ROWS, end)), slice(low, end + 1)
            at = np.arange(rows.stop - rows.start)
            cached: dict[int, Floats] = {}
            for used, count in self._splits(total):
                behind = used - count
                segment = cached.get(count)
                if segment is None:
                    segment = self._segment(level, count, behind, after, (rows, columns))
                if not self._counts_after:
                    cached[count] = segment
                if behind:
                    tail = np.maximum(best[behind, columns], transfer[columns] / count)
                    worst = np.maximum(segment, tail)
                    stop = worst.argmin(axis=1)
                    value, stop = worst[at, stop], stop + low
                else:
                    value, stop = segment[:, -1], np.full(len(at), end)
                if used < total:
                    value = np.maximum(value, transfer[rows] / count)
                better = value < best[used, rows]
                for array, new in ((best, value), (counts, count), (stops, stop)):
                    array[used, rows] = np.where(better, new, array[used, rows])
        return best, counts, stops

    def _splits(self, total: int) -> Iterator[tuple[int, int]]:
        """Yield (components in use, components of the first segment), few in use first."""
        for used in range(1, total + 1):
            for count in self._replica_counts(used):
                if count <= used:
                    yield used, count

    def _table(self, level: int, after: int) -> Floats:
        """Return A(i, j) of one component, float (S, S); infinite where i is not below j."""
        after = after if self._counts_after else 0
        if (level, after) in self._tables:
            return self._tables[level, after]
        total = self.levels[level].components
        transfer = self._transfers[level]
        shape = (len(self._ideals.masks),) * 2
        suffixes: list[Floats] = []
        for used in range(1, total + 1):
            best = np.full(shape, inf)
            for count in self._replica_counts(used):
                value = self._segment(level, count, used - count, after)
                if count < used:
                    first = np.maximum(value, transfer[None, :] / count)
                    first[first > self._bounds[level]] = inf
                    value = minmax_product(first, suffixes[used - count - 1])
                if used < total:
                    value = np.maximum(value, transfer[:, None] / count)
                np.minimum(best, value, out=best)
            best[best > self._bounds[level]] = inf
            suffixes.append(best)
        self._tables[level, after] = suffixes[-1]
        return suffixes[-1]

    def _segment(
        self, level: int, count: int, behind: int, after: int, window: _Window = _ALL
    ) -> Floats:
        """Return T(i, j) of segments with `count` replicas before `behind` components."""
        devices = num_devices(self.levels[:level])
        later = after + behind * devices
        if level:
            inside = self._table(level - 1, ceil(later / count))[window]
        else:
            inside = self._compute[window]
        if not level and self._counts_after:
            in_flight = ceil((count + later) / count)
            versions = self._problem.versions.count(in_flight)
            memory = versions * self._parameters[window] + in_flight * self._activations[window]
            limit = self._problem.memory_bytes
            is_enough = memory <= (inf if limit is None else limit)
            inside = memory if self._least_memory else np.where(is_enough, inside, inf)
        if self._least_memory:
            return inside
        factor = ring_factor(count) / self.levels[level].bytes_per_s
        if not factor:
            return inside / count
        return np.maximum(inside, factor * self._parameters[window]) / count

    def _replica_counts(self, used: int) -> Sequence[int]:
        # Of equally fast pipelines the one with fewer stages is taken: whole segments come first.
        return range(used, 0, -1) if self._problem.replicate else (1,)


def minmax_product(left: Floats, right: Floats) -> Floats:
    """Return out[i, j] = min over k of max(left[i, k], right[k, j]): stages one after the other.

    Args:
        left: Float (S, S), infinite on and below the diagonal.
        right: Float (S, S), infinite on and below the diagonal.

    Returns:
        Float (S, S), infinite on and below the diagonal.
    """
    size = len(left)
    out = np.full((size, size), np.inf)
    finite = right < np.inf
    # One beyond the last finite column of each row; 0 if there is none.
    ends = np.where(finite.any(axis=1), size - finite[:, ::-1].argmax(axis=1), 0)
    for i in range(size):
        ks = np.flatnonzero((left[i] < np.inf) & (ends > 0))
        for start in range(0, len(ks), _PRODUCT_ROWS):
            rows = ks[start : start + _PRODUCT_ROWS]
            columns = slice(rows[0] + 1, ends[rows].max())  # right[k] is infinite up to k
            worst = np.maximum(left[i, rows, None], right[rows, columns])
            np.minimum(out[i, columns], worst.min(axis=0), out=out[i, columns])
    return out
