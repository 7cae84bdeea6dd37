"""Choose the forward values to recompute, so that saved ones fit a budget of bytes, at least work.

The forward phase is a chain of *blocks* (`blocks.0`, `blocks.1`, ...). The program chooses, for
each block or run of up to `longest_run` blocks, the operators n to recompute and the values v to
save.

Variables of a run
    a_v   v is available in the backward phase, saved or recomputed      0 or 1
    r_n   n is recomputed                                                0 or 1
Objective
    minimise  sum_n flop(n) r_n + lambda sum_v bytes(v) (a_v - r_n(v)),     n(v) makes v
Constraints
    a_v = 1          for what backward nodes of the run use             `_problem`: required
    r_n <= a_v       for the arguments v of n                           `_solve`: asks
    r_n <= a_v       for the results v of n: a recomputed value is not saved
Values of another run can only be saved; graph inputs, and what three or more blocks read
(masks, rotary tables), are available anyway.

Each constraint says that one item requires another, so this is the least closure of `closure`: a
minimum cut, exact for each lambda. The lambdas at which the answer changes give the lower convex
hull of (bytes saved, work) of a run: its options. Along the chain, dynamic programming chooses one
option for each run, exactly, with bytes counted in units of which the budget has at most 4096:

    minimise  sum_runs work   subject to   sum_runs saved + max_runs recomputed <= budget

because the values recomputed for one run's backward nodes are alive together with all saved ones.
Blocks that are alike are solved once. Options off the convex hull are not tried.

Source: Jain et al., "Checkmate", MLSys 2020, for the problem; Beaumont et al., "Optimal
checkpointing for heterogeneous chains", 2019, for the chain; PyTorch's
`min_cut_rematerialization_partition` for cutting a joint graph at least bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

import numpy as np
from numpy.typing import NDArray

from sbp_core.errors import ConfigError
from sbp_core.graph.ir import LogicalGraph, Node, Phase, block_of
from sbp_core.passes.closure import least_closure
from sbp_core.passes.rematerialize import Region
from sbp_core.passes.saved_activations import call_flop, does_no_work, is_forward, sum_bytes
from sbp_core.units import format_bytes

#: Most options of one run.
_MAX_OPTIONS = 12

#: Most units of bytes in which a budget is counted.
_MAX_UNITS = 4096

#: Most limits that are tried for recomputed bytes alive at once.
_MAX_LIMITS = 24

#: A value that at least this many other blocks read counts as saved anyway.
_SHARED_FROM = 3


@dataclass(frozen=True, slots=True)
class _Problem:
    """A run, with nodes and values numbered, so that equal runs are equal problems.

    Args:
        flop: Work of each node; 0 if it is a view.
        recomputable: Whether each node may be recomputed.
        takes: The values that each node takes.
        size: Bytes of each value; 0 if it is available anyway.
        maker: The node that makes each value; -1 if it is in another run.
        required: Values that backward nodes of the run use.
    """

    flop: tuple[int, ...]
    recomputable: tuple[bool, ...]
    takes: tuple[tuple[int, ...], ...]
    size: tuple[int, ...]
    maker: tuple[int, ...]
    required: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One option of a run: bytes saved, most bytes recomputed at once, work, recomputed nodes."""

    saved_bytes: int
    recomputed_bytes: int
    flop: int
    nodes: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """An option of the blocks from `start` up to `stop`."""

    start: int
    stop: int
    option: _Option


def choose_regions(
    graph: LogicalGraph, memory_bytes: int, fixed: Collection[str], longest_run: int
) -> list[Region]:
    """Return the regions to recompute so that activations fit; see the module's docstring.

    Args:
        graph: A training step.
        memory_bytes: The budget.
        fixed: Forward nodes that are not recomputed.
        longest_run: Most consecutive blocks that are recomputed together.

    Raises:
        ConfigError: no choice fits the budget; names the least possible budget.
    """
    blocks, table, choices, limits = _choices(graph, fixed, longest_run)
    # The maximum over runs does not add up along the chain, so limits of it are tried: under each
    # limit, the rest of the budget is for saved values, which do add up.
    #
    #     available anyway + limit + sum of saved <= budget    recomputed for each run <= limit
    found: tuple[int, list[_Choice]] | None = None
    for limit in limits:
        allowed = [choice for choice in choices if choice.option.recomputed_bytes <= limit]
        budget = memory_bytes - table.common_bytes - limit
        chosen = _cheapest(len(blocks), allowed, budget)
        if chosen is None:
            # Units are rounded up, so that a budget near the least one may seem too small.
            leanest = _leanest(len(blocks), allowed)
            chosen = leanest if leanest is not None and _saved_bytes(leanest) <= budget else None
        if chosen is not None:
            work = sum(choice.option.flop for choice in chosen)
            found = min(found or (work, chosen), (work, chosen), key=lambda entry: entry[0])
    if found is None:
        least = table.common_bytes + _least_bytes(len(blocks), choices, limits)
        raise ConfigError(
            f"the activations of {graph.name!r} do not fit in {format_bytes(memory_bytes)}, of one "
            "micro-batch on all ranks together",
            accepted=f"memory_bytes >= {least} with "
            f"longest_run={longest_run} over {len(blocks)} blocks",
            todo="use smaller micro-batches, or raise longest_run",
        )
    return [table.region(choice) for choice in found[1] if choice.option.nodes]


def least_budget(graph: LogicalGraph, fixed: Collection[str], longest_run: int) -> int:
    """Return the least budget in bytes that `choose_regions` accepts."""
    blocks, table, choices, limits = _choices(graph, fixed, longest_run)
    return table.common_bytes + _least_bytes(len(blocks), choices, limits)


def _choices(
    graph: LogicalGraph, fixed: Collection[str], longest_run: int
) -> tuple[list[list[Node]], _Table, list[_Choice], list[int]]:
    """Return blocks, options of their runs, choices of both, limits of a run's recomputed bytes."""
    blocks: list[list[Node]] = []
    nodes = [node for node in graph.nodes if is_forward(node)]
    # Runs of forward nodes of one block; code between blocks belongs to the block before.
    for block, run in groupby(nodes, key=lambda node: block_of(node.module)):
        if block or not blocks:
            blocks.append(list(run))
        else:
            blocks[-1].extend(run)
    table = _Table(graph, blocks, frozenset(fixed))
    choices = [
        _Choice(start=start, stop=stop, option=option)
        for start in range(len(blocks))
        for stop in range(start + 1, min(start + longest_run, len(blocks)) + 1)
        for option in table.options(start, stop)
    ]
    limits = sorted({choice.option.recomputed_bytes for choice in choices})
    if len(limits) > _MAX_LIMITS:
        step = (len(limits) - 1) / (_MAX_LIMITS - 1)
        limits = [limits[round(index * step)] for index in range(_MAX_LIMITS)]
    return blocks, table, choices, limits


def _least_bytes(count: int, choices: Sequence[_Choice], limits: Sequence[int]) -> int:
    """Return the least sum of a limit and the saved bytes under it, over all limits."""
    found = []
    for limit in limits:
        leanest = _leanest(count, [c for c in choices if c.option.recomputed_bytes <= limit])
        if leanest is not None:
            found.append(limit + _saved_bytes(leanest))
    return min(found, default=0)


class _Table:
    """The options of every run; equal runs share them."""

    def __init__(
        self, graph: LogicalGraph, blocks: Sequence[Sequence[Node]], fixed: frozenset[str]
    ) -> None:
        self.graph, self.blocks, self.fixed = graph, blocks, fixed
        self.block = {node.name: at for at, run in enumerate(blocks) for node in run}
        self.uses = list(self._uses())
        self.common = frozenset(self._values_anyway())
        self.common_bytes = sum_bytes(graph, self.common)
        self.flop = {
            node.name: 0 if does_no_work(graph, node) else max(1, round(call_flop(graph, node)))
            for run in blocks
            for node in run
        }
        self.found: dict[_Problem, tuple[_Option, ...]] = {}

    def options(self, start: int, stop: int) -> tuple[_Option, ...]:
        """Return the options of a run; of several blocks only the one that saves least."""
        problem = self._problem(start, stop)
        if problem not in self.found:
            self.found[problem] = tuple(_hull(problem))
        found = self.found[problem]
        # Several blocks are joined to save fewer bytes than they can one by one. One option for
        # each such run keeps the choices few.
        return found if stop == start + 1 else found[-1:]

    def region(self, choice: _Choice) -> Region:
        """Return the nodes that a choice recomputes."""
        nodes = self._nodes(choice.start, choice.stop)
        first, last = block_of(nodes[0].module), block_of(nodes[-1].module)
        return Region(
            name=f"{first}-{last}#{choice.start}",
            members=frozenset(node.name for node in nodes),
            recomputable=frozenset(nodes[index].name for index in choice.option.nodes),
        )

    def _nodes(self, start: int, stop: int) -> list[Node]:
        return [node for run in self.blocks[start:stop] for node in run]

    def _uses(self) -> Iterator[tuple[int, str]]:
        """Yield (block, value): backward nodes of a block use a forward value; -1: of none."""
        for node in self.graph.nodes:
            if node.phase is Phase.FORWARD:
                continue
            for value in self.graph.tensor_inputs(node):
                producer = self.graph.producers.get(value)
                if producer is None or producer.name not in self.block:
                    continue
                own = self.block[producer.name]
                users = self.graph.users[value]
                leaves = any(self.block.get(user.name, own) != own for user in users)
                # A value that other blocks use as well counts for the block of the user.
                owner = self.block.get(node.forward, -1 if leaves else own) if leaves else own
                yield (owner if node.phase is Phase.BACKWARD else -1), value

    def _values_anyway(self) -> Iterator[str]:
        """Yield the values that are available anyway."""
        results = {out.value for out in self.graph.outputs}
        yield from (value for block, value in self.uses if block < 0 or value in results)
        for value, users in self.graph.users.items():
            producer = self.graph.producers.get(value)
            if producer is not None and producer.name in self.block:
                readers = {self.block[user.name] for user in users if user.name in self.block}
                if len(readers - {self.block[producer.name]}) >= _SHARED_FROM:
                    yield value

    def _problem(self, start: int, stop: int) -> _Problem:
        graph, nodes = self.graph, self._nodes(start, stop)
        numbers: dict[str, int] = {}

        def number(value: str) -> int:
            return numbers.setdefault(value, len(numbers))

        # Values, like nodes, are numbered in order of appearance: repeated blocks become equal
        # problems.
        free = {entry.name for entry in graph.inputs} | self.common
        takes = []
        for node in nodes:
            taken = (value for value in graph.tensor_inputs(node) if value not in free)
            takes.append(tuple(dict.fromkeys(number(value) for value in taken)))
            for value in node.outputs:
                number(value)
        required = {number(v) for at, v in self.uses if start <= at < stop and v not in self.common}
        place = {node.name: index for index, node in enumerate(nodes)}
        makers = [graph.producers[value] for value in numbers]
        return _Problem(
            flop=tuple(self.flop[node.name] for node in nodes),
            recomputable=tuple(node.name not in self.fixed for node in nodes),
            takes=tuple(takes),
            size=tuple(0 if v in self.common else graph.tensor(v).size_bytes for v in numbers),
            maker=tuple(place.get(maker.name, -1) for maker in makers),
            required=tuple(sorted(required)),
        )


def _hull(problem: _Problem) -> list[_Option]:
    """Return the options on the lower convex hull, from least work to least bytes saved."""
    bytes_all, flop_all = sum(problem.size), sum(problem.flop)
    # One unit of work outweighs all bytes; then one byte all work.
    ends = [_solve(problem, 1, bytes_all + 1), _solve(problem, flop_all + 1, 1)]
    found = {(end.flop, end.saved_bytes): end for end in ends}
    # Between two options, look for the best one at the slope of the line through them. If it is
    # below the line, the search continues on both sides of it; else the line is on the hull.
    #
    #     work
    #       |  cheap
    #       |     .  .
    #       |   between   .
    #       |       .        .
    #       |              .    dear
    #       +------------------------- bytes saved
    todo = [(ends[0], ends[1])]
    while todo and len(found) < _MAX_OPTIONS:
        dear, cheap = todo.pop(0)
        work, size = cheap.flop - dear.flop, dear.saved_bytes - cheap.saved_bytes
        if work <= 0 or size <= 0:
            continue
        between = _solve(problem, work, size)
        if (between.flop, between.saved_bytes) not in found:
            found[between.flop, between.saved_bytes] = between
            todo += [(dear, between), (between, cheap)]
    return sorted(found.values(), key=lambda option: option.flop)


def _solve(problem: _Problem, numerator: int, denominator: int) -> _Option:
    """Return the best option where a saved byte costs numerator / denominator of work."""
    # The objective, times the denominator so that all numbers are whole: a_v costs bytes(v), and
    # r_n costs its work less the bytes of its results, which are then available but not saved. A
    # variable requires the variables on the right of `<=` in its constraints.
    weights = {("v", at): numerator * size for at, size in enumerate(problem.size)}
    asks: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for at, flop in enumerate(problem.flop):
        if problem.recomputable[at]:
            weights["n", at] = denominator * flop
            asks["n", at] = [("v", value) for value in problem.takes[at]]
    for value, maker in enumerate(problem.maker):
        if ("n", maker) in asks:
            weights["n", maker] -= numerator * problem.size[value]
            asks["n", maker].append(("v", value))
    taken = least_closure(weights, asks, [("v", value) for value in problem.required])
    nodes = frozenset(at for kind, at in taken if kind == "n")
    made = {at for at, maker in enumerate(problem.maker) if maker in nodes}
    return _Option(
        saved_bytes=sum(problem.size[at] for kind, at in taken if kind == "v" and at not in made),
        recomputed_bytes=_peak_recomputed_bytes(problem, nodes),
        flop=sum(problem.flop[at] for at in nodes),
        nodes=nodes,
    )


def _peak_recomputed_bytes(problem: _Problem, nodes: Collection[int]) -> int:
    """Return the most recomputed bytes that are alive at once.

    Values that backward nodes use live on; other recomputed values die after their last use.
    """
    # By storage, because views (nodes without work) keep their bases alive: `base` is the value in
    # whose storage another one is, `last` the last node that reads a storage.
    base: dict[int, int] = {}
    last: dict[int, int] = {}
    made: dict[int, list[int]] = {}
    for value, maker in enumerate(problem.maker):
        if maker in nodes:
            made.setdefault(maker, []).append(value)
    order = sorted(nodes)
    for node in order:
        for value in problem.takes[node]:
            last[base.get(value, value)] = node
        for value in made[node]:
            viewed = problem.takes[node][:1] if not problem.flop[node] else ()
            base[value] = base.get(viewed[0], viewed[0]) if viewed else value
            last.setdefault(base[value], node)
    lasting = {base[value] for value in problem.required if value in base}
    passing = peak = 0
    for node in order:
        own = [v for v in made[node] if base[v] == v and v not in lasting and problem.flop[node]]
        passing += sum(problem.size[value] for value in own)
        peak = max(peak, passing)
        passing -= sum(
            problem.size[value]
            for value, at in last.items()
            if at == node
            and value not in lasting
            and problem.maker[value] in nodes
            and problem.flop[problem.maker[value]]
        )
    stays = sum(problem.size[v] for v in lasting if problem.maker[v] in nodes)
    return stays + peak


def _cheapest(count: int, choices: Sequence[_Choice], budget: int) -> list[_Choice] | None:
    """Return choices that cover all blocks, keep at most `budget` bytes, and take least work."""
    if budget < 0:
        return None
    # best[stop][b]: the least work for the blocks before `stop` with at most b units saved. Bytes
    # are rounded up to units, so that the result fits the budget.
    unit = gcd(*(choice.option.saved_bytes for choice in choices)) or 1
    unit = max(unit, -(-budget // _MAX_UNITS))
    units = budget // unit
    best: list[NDArray[np.float64]] = [np.full(units + 1, np.inf) for _ in range(count + 1)]
    best[0][:] = 0
    last = [np.full(units + 1, -1) for _ in range(count + 1)]
    # In the order in which runs begin: best[start] is final before the first choice from there is
    # processed.
    for index, choice in sorted(enumerate(choices), key=lambda entry: entry[1].start):
        saved_bytes = -(-choice.option.saved_bytes // unit)
        if saved_bytes > units:
            continue
        work = best[choice.start][: units + 1 - saved_bytes] + choice.option.flop
        # Slices are views, so the tables are written through them.
        target, mark = best[choice.stop][saved_bytes:], last[choice.stop][saved_bytes:]
        better = work < target
        target[better], mark[better] = work[better], index
    if not np.isfinite(best[count][units]):
        return None
    chosen: list[_Choice] = []
    left = units
    while count:
        choice = choices[int(last[count][left])]
        chosen.append(choice)
        left -= -(-choice.option.saved_bytes // unit)
        count = choice.start
    return chosen[::-1]


def _leanest(count: int, choices: Sequence[_Choice]) -> list[_Choice] | None:
    """Return the choices that cover all blocks and keep the fewest bytes; None if none cover."""
    least: dict[int, int] = {0: 0}
    last: dict[int, _Choice] = {}
    for choice in sorted(choices, key=lambda entry: entry.start):
        if choice.start in least:
            saved_bytes = least[choice.start] + choice.option.saved_bytes
            if saved_bytes < least.get(choice.stop, saved_bytes + 1):
                least[choice.stop], last[choice.stop] = saved_bytes, choice
    if count not in least:
        return None
    chosen: list[_Choice] = []
    while count:
        chosen.append(last[count])
        count = chosen[-1].start
    return chosen[::-1]


def _saved_bytes(chosen: Sequence[_Choice]) -> int:
    return sum(choice.option.saved_bytes for choice in chosen)
