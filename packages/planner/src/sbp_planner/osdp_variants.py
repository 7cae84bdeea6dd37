"""Search variants of a step (micro-batches, recomputation, slices) for the planner `osdp`.

    for each number of micro-batches, the smallest first
        no recomputation; then ever smaller budgets for activations
            choose storages under the limit (`storage_search`)
    for each of these that might be faster if less were gathered at once
        put parameters whose gathered copies are at the peak in slices, the largest first,
        by output or by contraction, as long as that is faster or makes it fit

The fastest choice of the guide without a limit gives the best time that a variant may reach. A
variant whose best time is no better than a plan that fits is skipped. All variants but the first
cost time to save memory, with one exception: a pipeline has a smaller bubble with more
micro-batches. So on one stage the search over their number ends when it cannot be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic

from sbp_core.errors import SbpError
from sbp_core.graph import graph_hash
from sbp_core.graph_variant import GraphFamily, GraphVariant, OperatorSlices, SliceAlong
from sbp_core.memory import MemoryKind
from sbp_core.planning import PlanRequest, recompute_budgets, splits_classes, variant_words
from sbp_planner.guide import shard_bytes
from sbp_planner.sharding import ShardingExtremes
from sbp_planner.storage_search import Choice, StorageSearch

#: The number of slices to try first; then more or fewer.
_FIRST_COUNT, _OTHER_COUNTS = 4, (2, 8)

#: How many classes of equal parameters are tried in slices for one variant.
_MAX_SLICED = 3

#: Copies below this share of the peak are not put in slices.
_LEAST_SHARE = 0.05

#: Times that differ by less than this relative amount are equal.
_TIE = 1e-9


@dataclass(slots=True, kw_only=True)
class TriedVariant:
    """One variant, and the results for it.

    Args:
        variant: The variant; None if the step has only one.
        search: The search for its storages.
        unlimited_s: Time of a step by the fastest choice of the guide, whatever memory it needs.
        is_followed: Whether its storages were searched.
    """

    variant: GraphVariant | None
    search: StorageSearch
    unlimited_s: float
    is_followed: bool = False

    @property
    def choice(self) -> Choice:
        """The best choice that fits; if none does, the leaner of the two extreme choices."""
        search = self.search
        if search.best is not None:
            return search.best
        return min(search.all_replicated, search.all_sharded, key=search.memory)

    @property
    def fits(self) -> bool:
        """Whether any choice that was tried fits."""
        return self.search.best is not None

    @property
    def step_s(self) -> float:
        """Time of a step of `choice`, in seconds."""
        return self.search.step_s(self.choice)

    def rank(self) -> tuple[bool, float]:
        """Return a key, less for the better: one that fits, then fast; else one that is small."""
        cost = self.step_s if self.fits else float(self.search.memory(self.choice))
        return not self.fits, cost

    @property
    def words(self) -> str:
        """How the variant differs from others, in words."""
        return "as asked for" if self.variant is None else variant_words(self.variant)


@dataclass(slots=True, kw_only=True)
class VariantSearch:
    """Searches the variants of one request.

    Args:
        request: The request to plan, with its family, if it has one.
        ends: Returns the two extreme strategies for the request of one variant.
        limit_bytes: Memory of one rank.
        may_split_classes: Whether the mesh has an axis on which classes may be split.
        ends_at: Time of `time.monotonic` after which no further variant is tried, in s.
        tried: The variants that were tried.
        untried: Whether time was too short for some variants.
        problems: The errors of variants that cannot be planned.
    """

    request: PlanRequest
    ends: Callable[[PlanRequest], ShardingExtremes]
    limit_bytes: float
    may_split_classes: bool
    ends_at: float = inf
    tried: list[TriedVariant] = field(default_factory=list)
    untried: bool = False
    problems: dict[str, SbpError] = field(default_factory=dict)

    @property
    def best(self) -> TriedVariant:
        """The fastest variant that fits, or else the leanest one."""
        return min((one for one in self.tried if one.is_followed), key=TriedVariant.rank)

    @property
    def best_s(self) -> float:
        """Time of a step of the best that fits; infinite if none does."""
        return self.best.step_s if self.best.fits else inf

    def run(self) -> TriedVariant:
        """Return the best variant with its storages.

        Raises:
            SbpError: the requested step cannot be planned.
        """
        family = self.request.family
        first = self._first(family)
        self._follow(first)
        if family is None or first.variant is None:
            return first
        if not self._is_unlimited(first) or self._is_pipeline(first):
            self._search_counts(family, first)
            self._search_slices(family)
        return self.best

    def _first(self, family: GraphFamily | None) -> TriedVariant:
        """Try the requested step, in one of its two forms.

        A softmax in one operator is faster than in parts, which are only for plans that split
        classes; such splits are never on the axis of the data.
        """
        if family is None:
            return self._looked_at(None, self.request)
        asked = family.variant
        whole = replace(asked, splits_classes=False)
        if asked.splits_classes and self.may_split_classes:
            first = self._looked_at(asked, self.request)
            if splits_classes(first.search.ends.replicated):
                return first
            self.tried.remove(first)
        try:
            joined = self.request.of(whole)
            if graph_hash(joined.graph) != graph_hash(self.request.graph):
                return self._looked_at(whole, joined)
        except SbpError:  # such as pins of values that only the other form has
            pass
        return self._looked_at(asked, self.request)

    def _search_counts(self, family: GraphFamily, first: TriedVariant) -> None:
        """Try numbers of micro-batches, each with more and more recomputation."""
        assert first.variant is not None, "the step has variants"
        for count in sorted(family.micro_batches):
            if count < first.variant.num_micro_batches:
                continue
            variant = replace(first.variant, num_micro_batches=count)
            found = first if variant == first.variant else self._look_at(variant)
            if found is None:
                continue
            if found.unlimited_s >= self.best_s * (1 - _TIE) and found is not self.best:
                if self._is_pipeline(first):
                    continue
                break
            self._follow(found)
            if family.may_recompute and not self._is_unlimited(found):
                self._search_budgets(found)

    def _search_budgets(self, base: TriedVariant) -> None:
        assert base.variant is not None, "the step has variants"
        for budget in recompute_budgets(base.search.request.graph):
            found = self._look_at(replace(base.variant, recompute_bytes=budget))
            if found is None:
                continue
            # A smaller budget recomputes more: it is no faster than this one at its best.
            if found.unlimited_s >= self.best_s * (1 - _TIE):
                break
            self._follow(found)

    def _search_slices(self, family: GraphFamily) -> None:
        """Try slices of parameters that are gathered at the peak."""
        if not family.may_slice:
            return
        for base in sorted(self.tried, key=lambda one: one.unlimited_s):
            best = base
            for names in self._gathered(base):
                if base.unlimited_s >= self.best_s * (1 - _TIE):
                    break
                best = self._sliced(best, names)

    def _sliced(self, base: TriedVariant, names: tuple[str, ...]) -> TriedVariant:
        """Return the best of a variant as it is and with some parameters in slices."""
        variant, best = base.variant, base
        assert variant is not None, "the step has variants"

        def try_(count: int, along: SliceAlong) -> None:
            nonlocal best
            added = (OperatorSlices(pattern=name, count=count, along=along) for name in names)
            found = self._look_at(replace(variant, slices=(*variant.slices, *added)))
            if found is not None:
                self._follow(found)
                best = min(best, found, key=TriedVariant.rank)

        for along in SliceAlong:
            try_(_FIRST_COUNT, along)
        if best is not base and best.variant is not None:
            along = best.variant.slices[-1].along
            for count in _OTHER_COUNTS:
                try_(count, along)
        return best

    def _gathered(self, tried: TriedVariant) -> Iterator[tuple[str, ...]]:
        """Yield classes of equal sharded matrices, the largest first, if copies are at the peak."""
        search, choice = tried.search, tried.choice
        if not _has_copies(search, choice):
            return
        graph = search.request.graph
        classes: dict[tuple[int, ...], list[str]] = {}
        for name, is_sharded in zip(search.names, choice, strict=True):
            shape = graph.tensor(name).shape
            divides = all(extent % _FIRST_COUNT == 0 for extent in shape)
            if is_sharded and len(shape) == 2 and divides:
                classes.setdefault(shape, []).append(name)
        ordered = sorted(classes.values(), key=lambda own: -graph.tensor(own[0]).size_bytes)
        yield from (tuple(names) for names in ordered[:_MAX_SLICED])

    # Single variants

    def _look_at(self, variant: GraphVariant) -> TriedVariant | None:
        """Return a variant with its unlimited time; None if it does not exist, or out of time."""
        known = next((one for one in self.tried if one.variant == variant), None)
        if known is not None:
            return known
        if monotonic() > self.ends_at:
            self.untried = True
            return None
        try:
            return self._looked_at(variant, self.request.of(variant))
        except SbpError as error:
            self.problems[variant_words(variant)] = error
            return None

    def _looked_at(self, variant: GraphVariant | None, request: PlanRequest) -> TriedVariant:
        quiet = replace(request, progress=None, family=None)
        if self.request.progress and variant is not None:
            self.request.progress(f"trying {variant_words(variant)}", 0.2)
        search = StorageSearch(request=quiet, ends=self.ends(quiet), limit_bytes=self.limit_bytes)
        tried = TriedVariant(
            variant=variant, search=search, unlimited_s=search.step_s(search.unlimited())
        )
        self.tried.append(tried)
        return tried

    def _follow(self, tried: TriedVariant) -> None:
        if not tried.is_followed:
            tried.search.follow()
            tried.is_followed = True

    def _is_unlimited(self, tried: TriedVariant) -> bool:
        """Whether the best choice of a variant that fits is no slower than without a limit."""
        return tried.fits and tried.step_s <= tried.unlimited_s * (1 + _TIE)

    def _is_pipeline(self, tried: TriedVariant) -> bool:
        return len(tried.search.ends.replicated.stages) > 1


def _has_copies(search: StorageSearch, choice: Choice) -> bool:
    """Whether whole copies of sharded parameters, or of their gradients, are part of the peak.

    Slices make these copies smaller, and nothing else. Also true if the memory at the peak is
    unknown.
    """
    peaks = search.peaks(choice)
    if peaks is None or not any(choice):
        return any(choice)
    graph, strategy = search.request.graph, search.strategy(choice)
    fullest = max(peaks.values(), key=lambda rank: rank.peak)
    held = sum(fullest.kinds.get(kind, 0) for kind in (MemoryKind.GATHERED, MemoryKind.GRADIENTS))
    # Gradients are at the peak in any case, in their storage.
    stored = sum(shard_bytes(graph, strategy, name) for name in search.names)
    return held - stored >= _LEAST_SHARE * fullest.peak
