"""Split the tensors of a segment, some layers of a step, on one mesh so that it takes least time.

For the planners `alpa` (a segment is a possible pipeline stage) and `galvatron` (a single layer).

    minimise    serial time of the segment, all mesh axes at once                               [s]
    such that   its memory with n micro-batches in flight <= the limit                          [B]

Without the limit it uses elimination (`sbp_core.infer.minimise`). With the limit it uses an integer
program, or for large segments a price on memory, as `joint.search` does for whole steps. Memory is
estimated as in `joint.lifetime`: the planner that joins the segments corrects the limit by the
memory of the compiled plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sbp_core.errors import PlanError
from sbp_core.infer import (
    FORBIDDEN_S,
    PINS,
    CostTables,
    Decision,
    FixedDecisions,
    Pins,
    StageMap,
    StepProblem,
    StepWork,
    decide_axis,
    find_equal_layers,
    minimise,
)
from sbp_core.sbp import NdSbp, Sbp, Split
from sbp_core.signatures import Signature1d, combine
from sbp_planner.choice import solve
from sbp_planner.joint.layers import repeated, tie
from sbp_planner.joint.lifetime import VariableMemory, held
from sbp_planner.joint.lower import lower_step
from sbp_planner.joint.near import MAX_DIRECT_ENTRIES, near
from sbp_planner.joint.priced import PricedMemory
from sbp_planner.joint.search import MAX_ENTRIES, MAX_PROGRAM_VARIABLES
from sbp_planner.segments import Segment, StepSegments, is_saved
from sbp_planner.submeshes import StageRanks

Bytes = NDArray[np.int64]

#: If there are more conversions to price on one mesh than this, signatures are left out
#: (`joint.near`). There are many meshes.
MAX_SEGMENT_PRICES = 100_000

#: Seconds for each integer program with memory in it.
_PROGRAM_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentProgram:
    """How a segment is split on a mesh.

    Args:
        mesh_shape: Ranks along each axis of the mesh.
        nodes: Signature of each node on each axis, in the order of `Segment.nodes`.
        inputs: SBP of each input on each axis, in the order of `Segment.inputs`.
        cost_s: Serial time, in seconds of a step.
        fixed_bytes, waiting_bytes: Bytes that the fullest rank holds at each place of the segment:
            independent of micro-batches in flight, and for each of them.
        is_exact: Whether nothing takes less time on this mesh.
    """

    mesh_shape: tuple[int, ...]
    nodes: tuple[tuple[Signature1d, ...], ...]
    inputs: tuple[tuple[Sbp, ...], ...]
    cost_s: float
    fixed_bytes: Bytes
    waiting_bytes: Bytes
    is_exact: bool

    def memory_bytes(self, in_flight: int) -> int:
        """Return the peak memory of the fullest rank, with so many micro-batches in flight."""
        return int((self.fixed_bytes + in_flight * self.waiting_bytes).max(initial=0))

    def kept(self, segment: Segment) -> FixedDecisions:
        """Return the decisions by the names of a segment with the same key as the solved one."""
        return FixedDecisions(
            nodes=dict(zip(segment.nodes, map(combine, self.nodes), strict=True)),
            storage=dict(zip(segment.inputs, (NdSbp(*of) for of in self.inputs), strict=True)),
        )


class SegmentSearch:
    """One segment on one mesh.

    Args:
        segments: The segments of the step.
        segment: The segment.
        ranks: Its ranks, and the ranks of its neighbours.
        pins: Pins to keep; by default the pins of the segments.

    Raises:
        PlanError: the pins cannot be satisfied.
    """

    #: If there are more conversions to price than this, signatures are left out.
    max_prices: ClassVar[float] = MAX_SEGMENT_PRICES

    def __init__(
        self, segments: StepSegments, segment: Segment, ranks: StageRanks, pins: Pins | None = None
    ) -> None:
        self.segments, self.segment, self.placement = segments, segment, ranks.own
        graph, axes = segment.graph, ranks.own.num_axes
        neighbours = [stage for stage in (ranks.before, ranks.after) if stage is not None]
        number = {True: 1, False: len(neighbours)}
        tensors = {e.name: 0 for e in graph.inputs if graph.is_tensor(e.name)}
        away = {name: number[before] for name, before in segment.elsewhere.items() if neighbours}
        work = StepWork(
            graph=graph,
            placements=(ranks.own, *neighbours),
            stages=StageMap(nodes=dict.fromkeys(segment.nodes, 0), inputs={**tensors, **away}),
            cluster=segments.cluster,
            bucket_bytes=segments.bucket_bytes,
            offloaded=segments.offloaded,
            tables=segments.tables,
            whole=segments.companions,
        )
        pins = segment.pins(pins or segments.pins)
        # A segment of many equal layers is posed as a segment of few.
        layers = find_equal_layers(work, pins)
        decision = Decision()
        for axis in range(axes):
            decide_axis(work, decision, axis, pins, layers=layers)
        self.problem = StepProblem(work, decision, range(axes), pins, layers=layers)
        #: Whether only signatures near the choice axis by axis are considered, because there are
        #: too many conversions.
        self.is_limited = self.problem.num_prices > self.max_prices
        if self.is_limited:
            kept = near(self.problem, repeated(self.problem))
            for name in away:
                # Values that cross to other stages keep all their storages.
                variable = self.problem.storage_variable[name]
                kept[variable] = np.arange(self.problem.sizes[variable])
            self.problem.restrict(kept)
        for name in away:
            self._send_in_parts(name)
        self.step = tie(self.problem)
        self._held: dict[int, VariableMemory] = {}

    def _send_in_parts(self, name: str) -> None:
        """Count, for a value that crosses to another stage, only its cost beyond the transfer.

        The transfer, the cheapest way to send it, is priced where the model is cut. The value is
        sent in as many parts as possible. A user of the whole, or partial sums, cost more.
        """
        problem = self.problem
        entries, variable = problem.storage_entries[name], problem.storage_variable[name]
        splits = [sum(isinstance(entry, Split) for entry in of) for of in entries]
        allowed = [at for at, count in enumerate(splits) if count == max(splits)]
        costs = np.full(len(entries), FORBIDDEN_S)
        costs[allowed] = problem.unary[variable][allowed]
        for group in problem.groups:
            asked = [one for one in group.requests if one.variable == variable]
            if group.source == variable:
                costs[allowed] -= group.costs[allowed].min()
            elif asked:
                costs[allowed] -= group.costs[:, asked[0].targets[allowed]].min()
        problem.unary[variable] = costs
        if problem.start[variable] not in allowed:
            problem.start[variable] = allowed[0]

    def free(self) -> tuple[SegmentProgram, tuple[int, ...]]:
        """Return the fastest program whatever memory it takes, and its values.

        Raises:
            PlanError: the pins cannot be satisfied.
        """
        tables = CostTables(self.step, max_entries=MAX_DIRECT_ENTRIES)
        found = minimise(tables.sizes, tables.factors, tables.start, max_entries=MAX_ENTRIES)
        values = self.step.expanded(found.values)
        exact = found.exact and not self.is_limited
        if self.problem.cost(self.problem.start) < self.problem.cost(values):
            values, exact = tuple(self.problem.start), False
        if self.problem.cost(values) >= FORBIDDEN_S:
            raise PlanError(
                f"no signatures of {', '.join(self.segment.nodes[:2])}, ... fulfil the pins on a "
                f"mesh of {self.placement.mesh_shape}",
                where=PINS,
                todo="remove a pin",
            )
        return self.program(values, exact=exact), values

    def within(
        self, limit_bytes: float, in_flight: int, free: tuple[int, ...]
    ) -> SegmentProgram | None:
        """Return a fast program that holds no more than a limit; None if none was found.

        Args:
            limit_bytes: Memory of a rank, as `SegmentProgram.memory_bytes` counts it.
            in_flight: Number of micro-batches in flight.
            free: The values of the fastest program.
        """
        memory = replace(self.held(in_flight), limit_bytes=limit_bytes)
        if len(memory.usages) > MAX_PROGRAM_VARIABLES:
            priced = PricedMemory(self.problem, self.step, memory, free, max_entries=MAX_ENTRIES)
            values = priced.within(limit_bytes)
        else:
            lowered = lower_step(self.problem, ties=repeated(self.problem), held=memory)
            found = solve(lowered.choice, time_limit_s=_PROGRAM_S, gap=1e-3).assignment
            values = None if found is None else lowered.values(found)
        if values is None or self.problem.cost(values) >= FORBIDDEN_S:
            return None
        program = self.program(values, exact=False)
        return program if program.memory_bytes(in_flight) <= limit_bytes else None

    def program(self, values: tuple[int, ...], *, exact: bool) -> SegmentProgram:
        """Return the program for a value of each variable."""
        problem, decision = self.problem, self.problem.decided(values)
        # After the last place nothing is held.
        one, two = (self.held(n).by_place(values)[:-1] for n in (1, 2))
        return SegmentProgram(
            mesh_shape=self.placement.mesh_shape,
            nodes=tuple(decision.nodes[name] for name in self.segment.nodes),
            inputs=tuple(decision.storage[name] for name in self.segment.inputs),
            cost_s=problem.cost(values),
            fixed_bytes=2 * one - two,
            waiting_bytes=two - one,
            is_exact=exact,
        )

    def held(self, in_flight: int) -> VariableMemory:
        """Return the memory of values; inputs for other segments do not count as states."""
        if in_flight in self._held:
            return self._held[in_flight]
        segment, problem = self.segment, self.problem
        found = held(problem, float("inf"), (in_flight,) * len(problem.work.placements))
        usages, intervals = list(found.usages), list(found.intervals)
        whole = 0, len(segment.graph.nodes) + 1
        for name in segment.elsewhere:
            own = found.inputs[name]
            if name not in segment.arriving:
                usages[own] = np.zeros_like(usages[own])
            elif is_saved(segment, name, self.segments.graph):
                usages[own] = usages[own] * in_flight
            intervals[own] = whole
        self._held[in_flight] = replace(found, usages=tuple(usages), intervals=tuple(intervals))
        return self._held[in_flight]
