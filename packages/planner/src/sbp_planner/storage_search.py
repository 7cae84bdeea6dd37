"""Choose the parameters that the planner `osdp` shards, by the time and memory of compiled plans.

    cell        the stages of a pipeline that are on the same ranks; without a pipeline, all
    choice      for each parameter, whether it is sharded

Each rank has a separate memory, so the estimate (`guide`) is a knapsack for each cell. Each cell
has a separate limit, which is corrected by the memory of its ranks in the compiled plan
(`sbp_core.planning.LimitSearch`). `improve` tries single changes and exchanges of the result.
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

#: How many choices of the guide are tried; each is between one that fits and one that does not.
MAX_TRIES = 12

#: Limits of the guide that differ by less than this share of the limit are treated as equal.
RESOLUTION = 1e-3

#: How many exchanges of parameters are compiled, at most.
MAX_EXCHANGES = 16

#: Sums of equal times in another order differ by less than this relative amount.
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
    """The search on one graph, with the results for all choices that were tried.

    Args:
        request: The request to plan.
        ends: The strategies that shard none, and all.
        limit_bytes: Memory of one rank.
    """

    request: PlanRequest
    ends: ShardingExtremes
    limit_bytes: float
    #: The fastest choice so far that fits; of equally fast ones the one with the least memory.
    best: Choice | None = None
    is_exact: bool = True
    _step_s: dict[Choice, float] = field(default_factory=dict)
    _memory: dict[Choice, dict[int, int]] = field(default_factory=dict)
    _host_bytes: dict[Choice, int] = field(default_factory=dict)

    @cached_property
    def compilation(self) -> Compilation:
        """The compilation of choices."""
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
        """The cost of each parameter replicated and sharded, by the guide."""
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
        # The strategy is mixed from the two extremes, without inference, so that a choice costs
        # little more than its compilation.
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
        """Return the peak memory of the fullest rank, of the compiled plan, in bytes."""
        return max(self.memory_by_rank(choice).values())

    def host_bytes(self, choice: Choice) -> int:
        """Return the most host memory that the plan needs for a rank, in bytes."""
        self.memory_by_rank(choice)
        return self._host_bytes[choice]

    def cell_memory(self, choice: Choice, cell: Cell) -> int:
        """Return the peak memory of the fullest rank of a cell, in bytes."""
        return max(self.memory_by_rank(choice)[rank] for rank in cell.ranks)

    def memory_by_rank(self, choice: Choice) -> dict[int, int]:
        """Return the peak memory of each rank, of the compiled plan, in bytes."""
        if choice not in self._memory:
            plan = self.plan(choice)
            self._memory[choice] = self.compilation.by_rank(plan)
            self.is_exact = self.is_exact and self.compilation.report(plan) is not None
            # Predicted now, while the plan is cached:
            self.step_s(choice)
            self._host_bytes[choice] = offloaded_bytes(plan)
        return self._memory[choice]

    def peaks(self, choice: Choice) -> Mapping[int, RankMemory] | None:
        """Return the memory at the peak of each rank; None if layouts of results are unknown."""
        found = self.compilation.report(self.plan(choice))
        return None if found is None else found.ranks

    def fits(self, choice: Choice) -> bool:
        """Return whether a choice keeps to the limit; remember the best choice that does."""
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
        """Return the fastest choice of the guide, whatever memory it needs."""
        found = choose(self.items, inf)
        assert found is not None, "without a limit everything fits"
        return tuple(index == SHARDED for index in found.chosen)

    def follow(self) -> None:
        """Try choices of the guide, from the fastest one to the last that fits in each cell."""
        limits = [self._limit_search(cell) for cell in self.cells]

        def held_bytes() -> list[int]:
            choice = self._joined(limits)
            self.fits(choice)
            return [self.cell_memory(choice, cell) for cell in self.cells]

        search_limits(limits, held_bytes)
        # Each cell as it last fitted: in the last compiled choice some cell may not fit.
        self.fits(self._joined(limits))
        # Both extremes are tried in any case, so the result is no worse than either that fits.
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
        search: The search, which judges choices.
        best: A choice that fits.

    Returns:
        A choice of which no change of a single parameter both fits and is faster.
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
    """Change equal parameters one by one, either the sharded or the replicated ones."""
    for index in alike:
        if best[index] is is_sharded:
            changed = (*best[:index], not is_sharded, *best[index + 1 :])
            # Equal parameters change the time of one thread equally. With a thread for boxing they
            # nearly do; simulating each would compile a plan for each.
            if search.step_s(changed) >= search.step_s(best) * (1 - _TIE):
                break
            if search.fits(changed):
                best = changed
    return best


def _exchanged(search: StorageSearch, best: Choice) -> Choice:
    """Shard one or two parameters for one or two others, where that is faster and fits."""
    # The memory that a parameter frees depends on the other choices. So near the limit a single
    # change is often too large, while two or three changes that offset each other fit.
    for changes in _exchanges(search, best)[:MAX_EXCHANGES]:
        changed = tuple(not one if at in changes else one for at, one in enumerate(best))
        if search.step_s(changed) < search.step_s(best) * (1 - _TIE) and search.fits(changed):
            return changed
    return best


def _exchanges(search: StorageSearch, best: Choice) -> list[tuple[int, ...]]:
    """Return exchanges that are faster by the guide, as indices of parameters.

    Exchanges that fit by the guide come first, then those that gain more. Changes offset each other
    only on the same ranks.
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
    """Yield, for each class of equal parameters, the first that is sharded, or is not."""
    for indices in alike:
        found = next((index for index in indices if choice[index] is is_sharded), None)
        if found is not None:
            yield found


def _alike(search: StorageSearch) -> list[list[int]]:
    """Return groups of parameters that are equal to the guide, the most important ones first."""
    cells = {index: at for at, cell in enumerate(search.cells) for index in cell.parameters}
    classes: dict[tuple[object, int], list[int]] = {}
    for index, options in enumerate(search.items):
        classes.setdefault((options, cells[index]), []).append(index)
    gaps = [abs(two[0].seconds - two[1].seconds) for two in search.items]
    return sorted(classes.values(), key=lambda own: -gaps[own[0]])
