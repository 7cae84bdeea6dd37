"""As few states in the memory of the host as it takes for a plan to fit.

    choose      offloaded, states that only the optimizer uses, all of one parameter together
    such that   exact memory of each rank of the compiled plan <= limit              [B]
                exact memory of its host <= the rank's share of that                 [B]

Each costs two copies over the link to the host in every step, latency and bytes; the most bytes for
a second of copies come off the device by the largest. So the parameters with the largest states go
first, and of these as few as fit, on the ranks of each stage by themselves. The last one of them is
then exchanged for a smaller one, if that is enough.

How many that are is searched by what compiled plans hold: a plan that fits could take so many bytes
back, one that does not has to give so many, between what is known to fit and what is known not to.

    states of a stage    |######|####|####|###|##|#|#|     largest first
                              not enough ^    ^ fits       limit between: ### or less
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from sbp_core.planning.compiled import Compilation, Compiled
from sbp_core.planning.host_states import by_parameter, sizes_by_stage, with_states
from sbp_core.strategy import Strategy

#: Numbers of states that are compiled by estimates, before intervals are halved.
_MAX_ESTIMATES = 6


@dataclass(slots=True, kw_only=True)
class _Cell:
    """The states on the ranks of some stages, and which numbers of them are known to fit.

    Args:
        ranks: Sorted.
        states: Those of each parameter, the largest first, as far as the host has room.
        sizes: Bytes of each on a rank.
        limit_bytes: Of the memory of a rank.
        below: The largest number that is known not to be enough; -1 if none is.
        above: The smallest number that is known to be enough; None if none is.
        held: What ranks held with a number.
    """

    ranks: tuple[int, ...]
    states: list[list[str]]
    sizes: list[int]
    limit_bytes: float
    below: int = -1
    above: int | None = None
    held: dict[int, float] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """How many there are."""
        return len(self.states)

    @property
    def is_hopeless(self) -> bool:
        """Whether not even all of them are enough."""
        return self.below >= self.most

    @property
    def is_settled(self) -> bool:
        """Whether the fewest that are enough are known."""
        return self.above is not None and self.above <= self.below + 1

    def see(self, count: int, held_bytes: float) -> None:
        """Learn what the fullest rank holds with a number of parameters offloaded."""
        self.held[count] = held_bytes
        if held_bytes <= self.limit_bytes:
            self.above = count if self.above is None else min(self.above, count)
        else:
            self.below = max(self.below, count)

    def next(self, *, halves: bool) -> int:
        """Return the number to look at next."""
        if self.above is None:
            return self.most
        if self.is_settled:
            return self.above
        low, high = self.below + 1, self.above - 1
        if halves:
            return (low + high) // 2
        sums = [0, *accumulate(self.sizes)]
        wanted = sums[self.above] + self.held[self.above] - self.limit_bytes
        if self.below > 0:
            # What is on its way is there with one state as with many: so this says more.
            wanted = sums[self.below] + self.held[self.below] - self.limit_bytes
        found = next((count for count, size in enumerate(sums) if size >= wanted), high)
        return min(max(found, low), high)


def until_it_fits(compilation: Compilation, strategy: Strategy) -> Compiled | None:
    """Return a strategy with the fewest of its largest states offloaded so that it fits.

    Args:
        compilation: Of its graph, with the limit.
        strategy: What it has offloaded does not count.

    Returns:
        None if it does not fit with as many as the host has memory for either, or nothing can be
        offloaded.

    Raises:
        PlanError: it cannot be compiled.
    """
    if compilation.request.cluster.device.host_memory_bytes is None:
        return None
    search = _FitSearch(compilation, strategy)
    return search.run()


class _FitSearch:
    """The search for one strategy; arguments as of `until_it_fits`."""

    def __init__(self, compilation: Compilation, strategy: Strategy) -> None:
        self.compilation = compilation
        self.bare = with_states(compilation.request, strategy, ())
        self.cells = list(_cells(compilation, self.bare))
        self.best: Compiled | None = None
        self._seen: dict[frozenset[str], Compiled] = {}

    def run(self) -> Compiled | None:
        cells = self.cells
        counts = [0 for _ in cells]
        number = 0
        while True:
            found = self._look_at(counts)
            if all(cell.is_settled for cell in cells) or any(cell.is_hopeless for cell in cells):
                break
            following = [cell.next(halves=number > _MAX_ESTIMATES) for cell in cells]
            if following == counts:  # what one stage holds changes with what others do
                break
            counts, number = following, number + 1
        if self.best is None or any(cell.is_hopeless for cell in cells):
            return self.best
        fewest = [cell.above or 0 for cell in cells]
        found = self._look_at(fewest)
        if not found.fits:
            return self.best
        return self._with_smaller_last(fewest, found)

    def _with_smaller_last(self, counts: Sequence[int], found: Compiled) -> Compiled:
        """Return the plan with the last parameter of each cell exchanged for one that suffices."""
        names: list[str] = []
        for cell, count in zip(self.cells, counts, strict=True):
            chosen = cell.states[:count]
            if count:
                spare = cell.limit_bytes - cell.held[count]
                enough = [size for size in cell.sizes[count - 1 :]
                          if size >= cell.sizes[count - 1] - spare]  # fmt: skip
                at = cell.sizes.index(min(enough), count - 1)
                chosen = [*chosen[:-1], cell.states[at]]
            names += [name for states in chosen for name in states]
        smaller = self._compiled(frozenset(names))
        return min(found, smaller, key=lambda one: (*one.rank()[:2], one.host_bytes))

    def _look_at(self, counts: Sequence[int]) -> Compiled:
        """Compile with numbers of parameters offloaded, and let each cell learn from that."""
        chosen = zip(self.cells, counts, strict=True)
        names = frozenset(n for cell, count in chosen for of in cell.states[:count] for n in of)
        found = self._compiled(names)
        held = self.compilation.by_rank(self.compilation.plan(found.strategy))
        for cell, count in zip(self.cells, counts, strict=True):
            cell.see(count, max(held[rank] for rank in cell.ranks))
        best = self.best
        if found.fits and (best is None or found.host_bytes <= best.host_bytes):
            self.best = found
        return found

    def _compiled(self, names: frozenset[str]) -> Compiled:
        if names not in self._seen:
            strategy = with_states(self.compilation.request, self.bare, names)
            self._seen[names] = self.compilation.compiled(strategy, exact=True)
        return self._seen[names]


def _cells(compilation: Compilation, strategy: Strategy) -> list[_Cell]:
    """Return the cells of a strategy."""
    graph = compilation.request.graph
    cells = {
        tuple(sorted(stage.rank_list)): _Cell(
            ranks=tuple(sorted(stage.rank_list)),
            states=[],
            sizes=[],
            limit_bytes=compilation.limit_bytes,
        )
        for stage in strategy.stages
    }
    found: list[tuple[int, list[str], _Cell]] = []
    for names in by_parameter(graph):
        size = sum(map(sum, sizes_by_stage(graph, strategy, names)))
        stage = strategy.stages[strategy.storage[names[0]].stage]
        found.append((size, names, cells[tuple(sorted(stage.rank_list))]))
    room = dict.fromkeys(cells, compilation.host_limit_bytes)
    for size, names, cell in sorted(found, key=lambda one: -one[0]):
        # What is larger than the room that is left is passed over, for what is smaller.
        if size <= room[cell.ranks]:
            room[cell.ranks] -= size
            cell.states.append(names)
            cell.sizes.append(size)
    return list(cells.values())
