"""Offload as few states to host memory as it takes for a plan to fit.

    choose      offloaded, states that only the optimizer uses, all of one parameter together
    such that   exact memory of each rank of the compiled plan <= limit              [B]
                exact memory of its host <= the rank's share of that                 [B]

Each offloaded state costs two copies over the link to the host in every step, latency and bytes.
The largest states free the most bytes per second of copying. So the parameters with the largest
states go first, as few as fit, for each stage separately. The last of them is then exchanged for a
smaller one, if that is enough.

`limit_search` finds the number of parameters from the memory of compiled plans; its counted
quantity is the bytes of the states that stay on the device.

    states of a stage    |######|####|####|###|##|#|#|     largest first
                              not enough ^    ^ fits       limit between: ### or less
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sbp_core.planning.compiled import Compilation, Compiled
from sbp_core.planning.host_states import by_parameter, sizes_by_stage, with_states
from sbp_core.planning.limit_search import LimitSearch, search_limits
from sbp_core.strategy import Strategy

#: Tries of the search for the number of states, at most: bytes are halved as often as it takes.
_MAX_TRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """The states on the ranks of some stages.

    Args:
        ranks: The ranks, sorted.
        states: The states of each parameter, the largest first, as far as the host has room.
        sizes: Bytes of the states of each parameter on a rank.
    """

    ranks: tuple[int, ...]
    states: list[list[str]]
    sizes: list[int]

    def search(self, limit_bytes: float, bare: float, most: float) -> LimitSearch[int]:
        """Return the search for the number of states to offload.

        Args:
            limit_bytes: Limit of the memory of a rank.
            bare: Bytes of the fullest rank with no state offloaded.
            most: Bytes of the fullest rank with all states offloaded, which fits.
        """
        stay = [sum(self.sizes) - gone for gone in accumulate(self.sizes, initial=0)]

        def choose(stay_bytes: float) -> int:
            return next(count for count, size in enumerate(stay) if size <= stay_bytes)

        fits = bare <= limit_bytes
        return LimitSearch(
            limit_bytes=limit_bytes,
            choose=choose,
            counted=stay.__getitem__,
            wanted=stay[0] if fits else limit_bytes - most,
            above=stay[0] + 1 if fits else stay[0],
            resolution_bytes=0.5,
            tries=_MAX_TRIES,
            fitting=len(self.states),
        )


def until_it_fits(compilation: Compilation, strategy: Strategy) -> Compiled | None:
    """Return a strategy that fits by offloading the fewest of its largest states.

    Args:
        compilation: The compilation for the strategy's graph, with the limit.
        strategy: The strategy; its present offloading is ignored.

    Returns:
        None if the plan does not fit even with all states that the host has memory for, or if
        nothing can be offloaded.

    Raises:
        PlanError: the strategy cannot be compiled.
    """
    if compilation.request.cluster.device.host_memory_bytes is None:
        return None
    search = _FitSearch(compilation, strategy)
    return search.run()


class _FitSearch:
    """The search for one strategy; for its arguments see `until_it_fits`."""

    def __init__(self, compilation: Compilation, strategy: Strategy) -> None:
        self.compilation = compilation
        self.bare = with_states(compilation.request, strategy, ())
        self.cells = list(_cells(compilation, self.bare))
        self.best: Compiled | None = None
        self._seen: dict[frozenset[str], Compiled] = {}

    def run(self) -> Compiled | None:
        limit_bytes = self.compilation.limit_bytes
        bare = self._held([0 for _ in self.cells])
        if max(bare) <= limit_bytes:
            return self.best
        most = self._held([len(cell.states) for cell in self.cells])
        if max(most) > limit_bytes:
            return self.best
        limits = [
            cell.search(limit_bytes, *held)
            for cell, *held in zip(self.cells, bare, most, strict=True)
        ]

        def counts() -> list[int]:
            # If no number fits any more next to the other stages, all states go.
            return [
                len(cell.states) if one.asked is None else one.asked
                for cell, one in zip(self.cells, limits, strict=True)
            ]

        search_limits(limits, lambda: self._held(counts()))
        fewest = counts()
        held = self._held(fewest)
        return self.best if max(held) > limit_bytes else self._with_smaller_last(fewest, held)

    def _with_smaller_last(self, counts: Sequence[int], held: Sequence[float]) -> Compiled:
        """Return the plan with the last parameter of each cell exchanged for one that suffices."""
        names: list[str] = []
        for cell, count, held_bytes in zip(self.cells, counts, held, strict=True):
            chosen = cell.states[:count]
            if count:
                spare = self.compilation.limit_bytes - held_bytes
                enough = [size for size in cell.sizes[count - 1 :]
                          if size >= cell.sizes[count - 1] - spare]  # fmt: skip
                at = cell.sizes.index(min(enough), count - 1)
                chosen = [*chosen[:-1], cell.states[at]]
            names += [name for states in chosen for name in states]
        smaller, found = self._compiled(frozenset(names)), self._compiled(self._names(counts))
        return min(found, smaller, key=lambda one: (*one.rank()[:2], one.host_bytes))

    def _names(self, counts: Sequence[int]) -> frozenset[str]:
        chosen = zip(self.cells, counts, strict=True)
        return frozenset(n for cell, count in chosen for of in cell.states[:count] for n in of)

    def _held(self, counts: Sequence[int]) -> list[float]:
        """Compile with these numbers of parameters offloaded; return the memory of each cell."""
        found = self._compiled(self._names(counts))
        if found.fits and (self.best is None or found.host_bytes <= self.best.host_bytes):
            self.best = found
        held = self.compilation.by_rank(self.compilation.plan(found.strategy))
        return [max(held[rank] for rank in cell.ranks) for cell in self.cells]

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
            ranks=tuple(sorted(stage.rank_list)), states=[], sizes=[]
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
        # States that are larger than the remaining room are skipped; smaller ones may still fit.
        if size <= room[cell.ranks]:
            room[cell.ranks] -= size
            cell.states.append(names)
            cell.sizes.append(size)
    return list(cells.values())
