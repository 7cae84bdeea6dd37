"""The search of `osdp` on one graph: which parameters to shard, judged by compiled plans.

    cell        the stages of a pipeline that are on the same ranks; without a pipeline, all
    choice      for each parameter, whether it is sharded

Each rank has a memory of its own, so the guide is a knapsack for each cell, and each has a limit of
its own, which is corrected by what the ranks of the cell hold in the compiled plan
(`sbp_core.planning.LimitSearch`). Single changes and exchanges of what that leads to are in
`improve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from math import inf
from operator import attrgetter

from sbp_core.compile import PhysicalPlan
from sbp_core.memory import RankMemory, offloaded_bytes
from sbp_core.planning import Compilation, LimitSearch, PlanRequest, search_limits
from sbp_core.strategy import Strategy
from sbp_planner.guide import SHARDED, parameter_options
from sbp_planner.knapsack import KnapsackOption, KnapsackSolution, choose
from sbp_planner.sharding import ShardingExtremes, mixed

#: Choices of the guide that are looked at; each lies between one that fits and one that does not.
MAX_TRIES = 12

#: Of the limit, how near limits of the guide are to each other that are not told apart.
RESOLUTION = 1e-3

#: Exchanges of parameters that are compiled before the search ends.
MAX_EXCHANGES = 16

#: Sums of equal times in another order differ by less than this share.
_TIE = 1e-9

#: For each parameter, whether it is sharded.
Choice = tuple[bool, ...]

#: For each parameter, its two options in the guide.
Items = tuple[tuple[KnapsackOption, KnapsackOption], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The ranks of some stages, and the parameters that they store.

    Args:
        ranks: Sorted.
        parameters: Their indices.
    """

    ranks: tuple[int, ...]
    parameters: tuple[int, ...]


@dataclass(kw_only=True)
class StorageSearch:
    """What is known of the choices that were looked at.

    Args:
        request: What to plan.
        ends: The strategies that shard none, and all.
        limit_bytes: Memory of one rank.
    """

    request: PlanRequest
    ends: ShardingExtremes
    limit_bytes: float
    #: The fastest choice so far that fits; among equals the one with the least memory.
    best: Choice | None = None
    is_exact: bool = True
    _step_s: dict[Choice, float] = field(default_factory=dict)
    _memory: dict[Choice, dict[int, int]] = field(default_factory=dict)
    _host_bytes: dict[Choice, int] = field(default_factory=dict)

    @cached_property
    def compilation(self) -> Compilation:
        """What compiles the choices."""
        return Compilation(request=self.request, limit_bytes=self.limit_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return self.ends.names

    @property
    def all_replicated(self) -> Choice:
        """The choice that shards nothing."""
        return (False,) * len(self.names)

    @property
    def all_sharded(self) -> Choice:
        """The choice that shards everything."""
        return (True,) * len(self.names)

    @cached_property
    def items(self) -> Items:
        """What each parameter costs either way, by the guide."""
        ends = self.ends
        return parameter_options(
            self.request.graph,
            self.names,
            self.request.cluster,
            replicated=ends.replicated,
            sharded=ends.sharded,
        )

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The cells, in the order of their first stages."""
        replicated = self.ends.replicated
        found: dict[tuple[int, ...], list[int]] = {}
        for stage in replicated.stages:
            found.setdefault(tuple(sorted(stage.rank_list)), [])
        for index, name in enumerate(self.names):
            stage = replicated.stages[replicated.storage[name].stage]
            found[tuple(sorted(stage.rank_list))].append(index)
        return tuple(Cell(ranks=ranks, parameters=tuple(own)) for ranks, own in found.items())

    def strategy(self, choice: Choice) -> Strategy:
        """Return the strategy of a choice."""
        if choice == self.all_replicated:
            return self.ends.replicated
        # Mixed of the two ends, without inference, so that a choice costs little more than its
        # compilation.
        chosen = {name for name, yes in zip(self.names, choice, strict=True) if yes}
        return mixed(self.request.graph, self.ends, chosen)

    def plan(self, choice: Choice) -> PhysicalPlan:
        """Return the compiled plan of a choice."""
        return self.compilation.plan(self.strategy(choice))

    def step_s(self, choice: Choice) -> float:
        """Return the predicted time of a step of the compiled plan."""
        if choice not in self._step_s:
            self._step_s[choice] = self.compilation.step_s(self.plan(choice))
        return self._step_s[choice]

    def memory(self, choice: Choice) -> int:
        """Return what the fullest rank holds at its peak, of the compiled plan, in bytes."""
        return max(self.memory_by_rank(choice).values())

    def host_bytes(self, choice: Choice) -> int:
        """Return what no rank exceeds in the memory of its host, in bytes."""
        self.memory_by_rank(choice)
        return self._host_bytes[choice]

    def cell_memory(self, choice: Choice, cell: Cell) -> int:
        """Return what the fullest rank of a cell holds at its peak, in bytes."""
        return max(self.memory_by_rank(choice)[rank] for rank in cell.ranks)

    def memory_by_rank(self, choice: Choice) -> dict[int, int]:
        """Return what each rank holds at its peak, of the compiled plan, in bytes."""
        if choice not in self._memory:
            plan = self.plan(choice)
            self._memory[choice] = self.compilation.by_rank(plan)
            self.is_exact = self.is_exact and self.compilation.report(plan) is not None
            # While its plan is there:
            self.step_s(choice)
            self._host_bytes[choice] = offloaded_bytes(plan)
        return self._memory[choice]

    def peaks(self, choice: Choice) -> Mapping[int, RankMemory] | None:
        """Return what is at the peak of each rank; None if it is not known how results lie."""
        found = self.compilation.report(self.plan(choice))
        return None if found is None else found.ranks

    def fits(self, choice: Choice) -> bool:
        """Whether a choice keeps to the limit; the best one that does is remembered."""
        host_limit_bytes = self.compilation.host_limit_bytes
        does = (
            self.memory(choice) <= self.limit_bytes and self.host_bytes(choice) <= host_limit_bytes
        )
        if does and (self.best is None or self._rank(choice) < self._rank(self.best)):
            self.best = choice
        return does

    @property
    def num_compiled(self) -> int:
        """How many choices were compiled."""
        return len({*self._step_s, *self._memory})

    def unlimited(self) -> Choice:
        """Return the fastest choice of the guide, whatever it needs."""
        found = choose(self.items, inf)
        assert found is not None, "without a limit everything fits"
        return tuple(index == SHARDED for index in found.chosen)

    def follow(self) -> None:
        """Look at choices of the guide, from the fastest one to the last that fits in each cell."""
        limits = [self._limit_search(cell) for cell in self.cells]

        def held_bytes() -> list[int]:
            choice = self._joined(limits)
            self.fits(choice)
            return [self.cell_memory(choice, cell) for cell in self.cells]

        search_limits(limits, held_bytes)
        # Each cell as it last fitted: what was compiled last may have had one that did not.
        self.fits(self._joined(limits))
        # Both ends are looked at in any case: so the result is no worse than either that fits.
        self.fits(self.all_replicated)
        self.fits(self.all_sharded)

    def _limit_search(self, cell: Cell) -> LimitSearch[KnapsackSolution]:
        """Return the search for the limit of the guide of a cell."""
        items = tuple(self.items[index] for index in cell.parameters)
        most = choose(items, inf)
        assert most is not None, "without a limit everything fits"
        return LimitSearch(
            limit_bytes=self.limit_bytes,
            choose=partial(choose, items),
            counted=attrgetter("memory_bytes"),
            wanted=most.memory_bytes,
            above=most.memory_bytes + 1.0,
            resolution_bytes=RESOLUTION * self.limit_bytes,
            tries=MAX_TRIES,
        )

    def _joined(self, limits: Sequence[LimitSearch[KnapsackSolution]]) -> Choice:
        choice = [True] * len(self.names)
        for cell, one in zip(self.cells, limits, strict=True):
            if one.asked is not None:
                for index, chosen in zip(cell.parameters, one.asked.chosen, strict=True):
                    choice[index] = chosen == SHARDED
        return tuple(choice)

    def _rank(self, choice: Choice) -> tuple[float, int]:
        return self.step_s(choice), self.memory(choice)


def improve(search: StorageSearch, best: Choice) -> Choice:
    """Change single parameters of a choice while that is faster and fits.

    Args:
        search: What judges choices.
        best: One that fits.

    Returns:
        One of which no change of a single parameter both fits and is faster.
    """
    before = None
    while best != before:
        before = best
        for alike in _alike(search):
            for is_sharded in (True, False):
                best = _improved_alike(search, best, alike, is_sharded=is_sharded)
        if best == before:
            best = _exchanged(search, best)
    return best


def _improved_alike(
    search: StorageSearch, best: Choice, alike: Sequence[int], *, is_sharded: bool
) -> Choice:
    """Change those of equal parameters that are sharded, or are not."""
    for index in alike:
        if best[index] is is_sharded:
            changed = (*best[:index], not is_sharded, *best[index + 1 :])
            # Alike parameters change the time of one thread alike. With a thread for boxing they
            # nearly do; asking for each would compile a plan for each.
            if search.step_s(changed) >= search.step_s(best) * (1 - _TIE):
                break
            if search.fits(changed):
                best = changed
    return best


def _exchanged(search: StorageSearch, best: Choice) -> Choice:
    """Shard one or two parameters for one or two others, where that is faster and fits."""
    # What a parameter frees depends on which others are sharded, so that near the limit a single
    # change is often too large, where two or three that make up for each other are not.
    for changes in _exchanges(search, best)[:MAX_EXCHANGES]:
        changed = tuple(not one if at in changes else one for at, one in enumerate(best))
        if search.step_s(changed) < search.step_s(best) * (1 - _TIE) and search.fits(changed):
            return changed
    return best


def _exchanges(search: StorageSearch, best: Choice) -> list[tuple[int, ...]]:
    """Return exchanges that are faster by the guide, by their parameters.

    Those that fit by the guide come first, then those that gain more. Parameters make up for each
    other only on the same ranks.
    """
    alike = _alike(search)
    found = []
    for cell in search.cells:
        own = [part for part in alike if part[0] in cell.parameters]
        room_bytes = search.limit_bytes - search.cell_memory(best, cell)
        for num_out, num_into in ((1, 1), (2, 1), (1, 2)):
            for out in combinations(_first_of_each(own, best, is_sharded=True), num_out):
                for into in combinations(_first_of_each(own, best, is_sharded=False), num_into):
                    gain_s, more_bytes = _exchange(search.items, out, into)
                    if gain_s > 0:
                        found.append((more_bytes > room_bytes, -gain_s, (*out, *into)))
    return [changes for _, _, changes in sorted(found)]


def _exchange(items: Items, out: Sequence[int], into: Sequence[int]) -> tuple[float, float]:
    """Return the seconds gained and the bytes added by not sharding `out`, but `into`."""
    gain_s, more_bytes = 0.0, 0.0
    for at, sign in (*((at, 1) for at in out), *((at, -1) for at in into)):
        replicated, sharded = items[at]
        gain_s += sign * (sharded.seconds - replicated.seconds)
        more_bytes += sign * (replicated.resident_bytes - sharded.resident_bytes)
    return gain_s, more_bytes


def _first_of_each(
    alike: Sequence[Sequence[int]], choice: Choice, *, is_sharded: bool
) -> Iterator[int]:
    """Yield of each class of equal parameters the first that is sharded, or is not."""
    for indices in alike:
        found = next((index for index in indices if choice[index] is is_sharded), None)
        if found is not None:
            yield found


def _alike(search: StorageSearch) -> list[list[int]]:
    """Return the parameters that the guide cannot tell apart, those that matter most first."""
    cells = {index: at for at, cell in enumerate(search.cells) for index in cell.parameters}
    classes: dict[tuple[object, int], list[int]] = {}
    for index, options in enumerate(search.items):
        classes.setdefault((options, cells[index]), []).append(index)
    gaps = [abs(two[0].seconds - two[1].seconds) for two in search.items]
    return sorted(classes.values(), key=lambda own: -gaps[own[0]])
