"""Place groups of operators on devices by an integer program, such that a step takes least time.

    x[i, o]       1 if group i is on the ranks of option o                        binary
    e[k, o, p]    1 if flow k goes from option o to option p                      in [0, 1]
    sf[i], sb[i]  when forward and backward of group i begin                      >= 0, seconds
    y[i, j]       1 if i goes before j, of groups that do not use each other      binary
    z[i, j]       1 if i and j have ranks in common                               in [0, 1]
    T, L, U       end of a micro-batch; work of the busiest rank for one; its update

    minimise    T + (m - 1) L + U                                    m micro-batches
    such that   sum_o x[i, o] = 1                                    each group i
                sum_p e[k, o, p] = x[i, o], sum_o e[k, o, p] = x[j, p]      flow k from i to j
                sf[j] >= sf[i] + forward of i + delay of k           values come
                sb[i] >= sb[j] + backward of j + delay of k          gradients go back
                sb[i] >= sf[t] + forward of t                        i, t without followers
                z[i, j] >= x[i, o] + sum_(p meets o) x[j, p] - 1     i, j not on each other's way
                s[j] >= s[i] + time of i - H (2 - y - z)             no rank does two at once,
                s[i] >= s[j] + time of j - H (1 + y - z)             forward and backward each
                T >= sb[i] + backward of i, T >= L                   each group i
                L >= sum of times on a rank, U >= sum of updates     each rank
                sum of bytes on a rank <= its memory                 each rank

H is the time of a known placement. All groups lead to the loss, so all of forward is before all of
backward. A transfer delays only the group that waits for it. Micro-batches after the first follow
as fast as the busiest rank allows.

Source: Pal et al., "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training",
IEEE Micro 39 (2019), section on DLPlacer: placement of operators and its schedule as one integer
program; here with sets of ranks as places, and several micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Any

import highspy
import numpy as np

from sbp_planner.choice.program import silent_model

#: Seconds for each option.
Times = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFlow:
    """A value from one group to another.

    Args:
        producer, consumer: Indices of groups.
        delay_s: [option of the producer][option of the consumer], of the value or its gradient.
    """

    producer: int
    consumer: int
    delay_s: tuple[Times, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """The groups to place, and the places.

    Args:
        options: The ranks of each place.
        forward_s, backward_s: [group][option], seconds for one micro-batch.
        update_s: [group][option], seconds for one step.
        memory_bytes: [group][option], bytes on each rank of the option.
        flows: Values between groups; a group comes before the groups that use it.
        limit_bytes: Memory of a rank.
        micro_batches: The number m.
        uses_all: Whether every place must have a group.
        is_symmetric: Whether ranks are alike, so that the longest group may be fixed to rank 0.
    """

    options: tuple[frozenset[int], ...]
    forward_s: tuple[Times, ...]
    backward_s: tuple[Times, ...]
    update_s: tuple[Times, ...]
    memory_bytes: tuple[tuple[int, ...], ...]
    flows: tuple[PlacedFlow, ...]
    limit_bytes: float = inf
    micro_batches: int = 1
    uses_all: bool = False
    is_symmetric: bool = False

    @property
    def num_groups(self) -> int:
        """Number of groups to place."""
        return len(self.forward_s)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(sorted({rank for option in self.options for rank in option}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSolution:
    """A placement and its time.

    Args:
        chosen: For each group, its option.
        step_s: Its time T + (m - 1) L + U.
        bound_s: No placement takes less, in this model.
    """

    chosen: tuple[int, ...]
    step_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return max(self.step_s - self.bound_s, 0.0) / self.step_s if self.step_s else 0.0


def solve_placement(
    problem: PlacementProblem, time_limit_s: float, gap: float = 0.0
) -> PlacementSolution | None:
    """Return the placement of least time.

    Args:
        problem: The groups to place, and the places.
        time_limit_s: Seconds after which the best so far is returned.
        gap: Relative distance to the bound at which a placement is good enough.

    Returns:
        The placement; None if none is known that fits.
    """
    start = greedy_placement(problem)
    known_s = step_of(problem, start) if start is not None else inf
    program = _Program(problem, known_s)
    found, bound_s = program.solve(time_limit_s, gap)
    candidates = [chosen for chosen in (found, start) if chosen is not None]
    if not candidates:
        return None
    # The list schedule may be slower than the program's own order, which is then kept.
    times = {chosen: step_of(problem, chosen) for chosen in candidates}
    if found is not None and program.step_s < times[found]:
        times[found] = program.step_s
    best = min(times, key=lambda chosen: times[chosen])
    return PlacementSolution(chosen=best, step_s=times[best], bound_s=min(bound_s, times[best]))


def fits(problem: PlacementProblem, chosen: Sequence[int]) -> bool:
    """Whether a placement keeps to the memory of each rank, and uses all places if it must."""
    held = dict.fromkeys(problem.ranks, 0)
    for group, option in enumerate(chosen):
        for rank in problem.options[option]:
            held[rank] += problem.memory_bytes[group][option]
    uses_all = set(chosen) == set(range(len(problem.options)))
    return max(held.values()) <= problem.limit_bytes and (uses_all or not problem.uses_all)


def step_of(problem: PlacementProblem, chosen: Sequence[int]) -> float:
    """Return the time of a step by a list schedule: the task with the longest tail goes first."""
    options, num = problem.options, problem.num_groups
    forward = [problem.forward_s[i][o] for i, o in enumerate(chosen)]
    backward = [problem.backward_s[i][o] for i, o in enumerate(chosen)]
    delays = [
        (flow.producer, flow.consumer, flow.delay_s[chosen[flow.producer]][chosen[flow.consumer]])
        for flow in problem.flows
    ]
    ranks = [options[option] for option in chosen]
    ends = _list_schedule(forward, delays, ranks, [0.0] * num)
    begin = max(ends)
    back = [(consumer, producer, delay) for producer, consumer, delay in delays]
    end_s = max(_list_schedule(backward, back, ranks, [begin] * num))
    load = dict.fromkeys(problem.ranks, 0.0)
    update = dict.fromkeys(problem.ranks, 0.0)
    for group, option in enumerate(chosen):
        for rank in options[option]:
            load[rank] += forward[group] + backward[group]
            update[rank] += problem.update_s[group][option]
    return end_s + (problem.micro_batches - 1) * max(load.values()) + max(update.values())


def _list_schedule(
    seconds: Sequence[float],
    delays: Sequence[tuple[int, int, float]],
    ranks: Sequence[frozenset[int]],
    begin: Sequence[float],
) -> list[float]:
    """Return the end time of each task."""
    behind = list(seconds)
    missing = [0] * len(seconds)
    for _, after, _ in delays:
        missing[after] += 1
    for first in reversed(_order(len(seconds), delays)):
        later = [delay + behind[after] for before, after, delay in delays if before == first]
        behind[first] = seconds[first] + max(later, default=0.0)
    ready = {task: begin[task] for task in range(len(seconds)) if not missing[task]}
    free: dict[int, float] = {}
    ends = [0.0] * len(seconds)
    while ready:
        starts = {
            task: max([at, *(free.get(rank, 0.0) for rank in ranks[task])])
            for task, at in ready.items()
        }
        task = min(starts, key=lambda one: (starts[one], -behind[one], one))
        ends[task] = starts[task] + seconds[task]
        free |= dict.fromkeys(ranks[task], ends[task])
        del ready[task]
        for before, after, _ in delays:
            if before == task:
                missing[after] -= 1
                if not missing[after]:
                    arrivals = (ends[b] + d for b, a, d in delays if a == after)
                    ready[after] = max([begin[after], *arrivals])
    return ends


def _order(num: int, delays: Sequence[tuple[int, int, float]]) -> list[int]:
    """Return the tasks in topological order: each after the tasks that it waits for."""
    missing = [0] * num
    for _, after, _ in delays:
        missing[after] += 1
    todo = [task for task in range(num) if not missing[task]]
    order: list[int] = []
    while todo:
        order.append(task := todo.pop())
        for before, after, _ in delays:
            if before == task:
                missing[after] -= 1
                if not missing[after]:
                    todo.append(after)
    return order


def greedy_placement(problem: PlacementProblem) -> tuple[int, ...] | None:
    """Return a placement that fits, improved by moving single groups while that is faster.

    It begins with all groups on one place; if all places are needed, with one of the last groups on
    each further place. None if no such start fits.
    """
    num = problem.num_groups
    starts = [(option,) * num for option in range(len(problem.options))]
    if problem.uses_all:
        last = len(problem.options) - 1
        starts = [(*([0] * (num - last)), *range(1, last + 1))] if num > last else []
    starts = [chosen for chosen in starts if fits(problem, chosen)]
    if not starts:
        return None
    best = min(starts, key=lambda chosen: step_of(problem, chosen))
    best_s, is_better = step_of(problem, best), True
    while is_better:
        is_better = False
        for group in range(num):
            for option in range(len(problem.options)):
                moved = (*best[:group], option, *best[group + 1 :])
                if moved != best and fits(problem, moved):
                    seconds = step_of(problem, moved)
                    if seconds < best_s * (1 - 1e-9):
                        best, best_s, is_better = moved, seconds, True
    return best


class _Program:
    """The integer program, in units of the time of the known placement, or of serial work."""

    def __init__(self, problem: PlacementProblem, known_s: float) -> None:
        self.problem = problem
        self.step_s = inf
        serial_s = sum(
            max(f) + max(b) + max(u)
            for f, b, u in zip(problem.forward_s, problem.backward_s, problem.update_s, strict=True)
        )
        serial_s *= problem.micro_batches
        serial_s += 2 * sum(max(map(max, flow.delay_s)) for flow in problem.flows)
        self.unit = known_s if known_s < inf else max(serial_s, 1e-12)
        self.horizon = 1.0
        self.columns: list[tuple[float, float, float]] = []  # cost, lower, upper
        self.integers: list[int] = []
        self.rows: list[tuple[float, dict[int, float]]] = []  # sum >= right
        self.equal: list[tuple[float, dict[int, float]]] = []
        self._build()

    def _column(self, cost: float = 0.0, upper: float = 1.0, *, integer: bool = False) -> int:
        self.columns.append((cost, 0.0, upper))
        if integer:
            self.integers.append(len(self.columns) - 1)
        return len(self.columns) - 1

    def _times(self, seconds: Sequence[float], group: int, sign: float) -> dict[int, float]:
        """Return the terms for a time of a group that depends on its place."""
        return {
            column: sign * one / self.unit
            for column, one in zip(self.x[group], seconds, strict=True)
        }

    def _build(self) -> None:
        problem, num = self.problem, self.problem.num_groups
        places = range(len(problem.options))
        self.x = [[self._column(integer=True) for _ in places] for _ in range(num)]
        self.sf = [self._column(upper=self.horizon) for _ in range(num)]
        self.sb = [self._column(upper=self.horizon) for _ in range(num)]
        self.end = self._column(1.0, self.horizon)
        self.load = self._column(float(problem.micro_batches - 1), self.horizon)
        self.update = self._column(1.0, self.horizon)
        self.equal += [(1.0, dict.fromkeys(self.x[i], 1.0)) for i in range(num)]
        self._add_flows()
        self._add_ends()
        self._add_ranks()
        for first, second in self._unordered():
            self._add_pair(first, second)
        if problem.uses_all:
            for option in places:
                self.rows.append((1.0, {self.x[i][option]: 1.0 for i in range(num)}))
        if problem.is_symmetric:
            work = [max(problem.forward_s[i]) + max(problem.backward_s[i]) for i in range(num)]
            longest = work.index(max(work))
            held = {
                self.x[longest][o]: 1.0 for o in places if min(problem.ranks) in problem.options[o]
            }
            self.rows.append((1.0, held))

    def _add_flows(self) -> None:
        problem = self.problem
        places = range(len(problem.options))
        for flow in problem.flows:
            arcs = [[self._column() for _ in places] for _ in places]
            here, there = self.x[flow.producer], self.x[flow.consumer]
            for o in places:
                self.equal.append((0.0, {**{arcs[o][p]: 1.0 for p in places}, here[o]: -1.0}))
                self.equal.append((0.0, {**{arcs[p][o]: 1.0 for p in places}, there[o]: -1.0}))
            delay = {arcs[o][p]: -flow.delay_s[o][p] / self.unit for o in places for p in places}
            forward = self._times(problem.forward_s[flow.producer], flow.producer, -1.0)
            ends = {self.sf[flow.consumer]: 1.0, self.sf[flow.producer]: -1.0}
            self.rows.append((0.0, {**ends, **forward, **delay}))
            backward = self._times(problem.backward_s[flow.consumer], flow.consumer, -1.0)
            ends = {self.sb[flow.producer]: 1.0, self.sb[flow.consumer]: -1.0}
            self.rows.append((0.0, {**ends, **backward, **delay}))

    def _add_ends(self) -> None:
        problem, num = self.problem, self.problem.num_groups
        followed = {flow.producer for flow in problem.flows}
        last = [group for group in range(num) if group not in followed]
        for group in last:
            for other in last:
                forward = self._times(problem.forward_s[other], other, -1.0)
                ends = {self.sb[group]: 1.0, self.sf[other]: -1.0}
                self.rows.append((0.0, {**ends, **forward}))
        for group in range(num):
            backward = self._times(problem.backward_s[group], group, -1.0)
            self.rows.append((0.0, {self.end: 1.0, self.sb[group]: -1.0, **backward}))
        self.rows.append((0.0, {self.end: 1.0, self.load: -1.0}))

    def _add_ranks(self) -> None:
        problem = self.problem
        largest = max((max(held) for held in problem.memory_bytes), default=0) or 1
        for rank in problem.ranks:
            load, update, held = {self.load: 1.0}, {self.update: 1.0}, dict[int, float]()
            for group, columns in enumerate(self.x):
                for option, column in enumerate(columns):
                    if rank in problem.options[option]:
                        both = problem.forward_s[group][option] + problem.backward_s[group][option]
                        load[column] = -both / self.unit
                        update[column] = -problem.update_s[group][option] / self.unit
                        held[column] = -problem.memory_bytes[group][option] / largest
            self.rows += [(0.0, load), (0.0, update)]
            if problem.limit_bytes < inf:
                self.rows.append((-problem.limit_bytes / largest, held))

    def _unordered(self) -> list[tuple[int, int]]:
        """Return the pairs of groups neither of which waits for the other."""
        num = self.problem.num_groups
        behind: list[set[int]] = [set() for _ in range(num)]
        delays = [(flow.producer, flow.consumer, 0.0) for flow in self.problem.flows]
        for group in reversed(_order(num, delays)):
            for before, after, _ in delays:
                if before == group:
                    behind[group] |= {after} | behind[after]
        return [
            (a, b)
            for a, b in combinations(range(num), 2)
            if b not in behind[a] and a not in behind[b]
        ]

    def _add_pair(self, first: int, second: int) -> None:
        """Keep two groups with common ranks apart in time."""
        problem = self.problem
        places = range(len(problem.options))
        meet = self._column()
        for o in places:
            others = [p for p in places if problem.options[o] & problem.options[p]]
            row = {meet: 1.0, self.x[first][o]: -1.0}
            row |= {self.x[second][p]: -1.0 for p in others}
            self.rows.append((-1.0, row))
        for start, seconds in ((self.sf, problem.forward_s), (self.sb, problem.backward_s)):
            before, span = self._column(integer=True), self.horizon
            # s[second] - s[first] - time - H y - H z >= -2 H, and the other way round
            time = self._times(seconds[first], first, -1.0)
            ends = {start[second]: 1.0, start[first]: -1.0, before: -span, meet: -span}
            self.rows.append((-2 * span, {**ends, **time}))
            time = self._times(seconds[second], second, -1.0)
            ends = {start[first]: 1.0, start[second]: -1.0, before: span, meet: -span}
            self.rows.append((-span, {**ends, **time}))

    def solve(self, time_limit_s: float, gap: float) -> tuple[tuple[int, ...] | None, float]:
        """Return the best placement found, if any, and the lower bound of its time in seconds."""
        model = self._model(time_limit_s, gap)
        model.run()
        info = model.getInfo()
        bound = info.mip_dual_bound * self.unit
        if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            # The known placement is optimal: no other takes as little.
            return None, self.unit
        if info.primal_solution_status != 2:
            return None, max(bound, 0.0)
        values = np.asarray(model.getSolution().col_value)
        self.step_s = info.objective_function_value * self.unit
        chosen = tuple(int(np.argmax(values[columns])) for columns in self.x)
        return chosen, max(bound, 0.0)

    def _model(self, time_limit_s: float, gap: float) -> Any:
        model = silent_model()
        for name, value in (("mip_rel_gap", gap), ("threads", 1), ("time_limit", time_limit_s)):
            model.setOptionValue(name, value)
        cost, lower, upper = (np.array(column) for column in zip(*self.columns, strict=True))
        lp = highspy.HighsLp()
        rows = [*((right, right, row) for right, row in self.equal)]
        rows += [(right, highspy.kHighsInf, row) for right, row in self.rows]
        lp.num_col_, lp.num_row_ = len(self.columns), len(rows)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        lp.row_lower_ = np.array([low for low, _, _ in rows])
        lp.row_upper_ = np.array([high for _, high, _ in rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        sizes = [len(row) for _, _, row in rows]
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        lp.a_matrix_.index_ = np.array([c for _, _, row in rows for c in row], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for _, _, row in rows for v in row.values()])
        kinds = [highspy.HighsVarType.kContinuous] * len(self.columns)
        for column in self.integers:
            kinds[column] = highspy.HighsVarType.kInteger
        lp.integrality_ = kinds
        model.passModel(lp)
        return model
