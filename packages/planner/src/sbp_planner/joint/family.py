"""Find the fastest variant of a training step and its plan, for the planner `ilp`.

Variants differ in micro-batches, recomputation, operators in slices, and softmaxes in parts.

    for each number of micro-batches, for each variant with it, the least floor first
        floor    each operator alone, at its fastest            no less than the best plan:  struck
        proof    a bound, found without a good assignment       no less than the best plan:  struck
        bound    no assignment takes less, whatever it holds    no less than the best plan:  struck
        plan     the fastest that was found and fits the exact memory of a rank

The proof goes only as far as the best plan. So it comes before the steps that are only worthwhile
for a variant that may be better: a search axis by axis, and compiling plans. For very large steps,
finding a plan takes long, and its memory is limited by a price rather than exactly. Of these, a
variant that could gain very little is not planned either (`_NEAR_SHARE`); the reported bound says
how little.

A variant with recomputation or slices has the same operators, some of them twice or in parts. It
needs less memory and no less time. So it is only tried if the fastest plan of the same form does
not fit.

All these times are serial times of one step of the same samples, so variants can be compared. The
better the best plan, the earlier the proof of a bound ends, because only assignments that cost less
matter to it (`choice.prove`). Plans that fit are searched for as in `joint.search`. All variants
share prices and options of operators.

The bound of the answer is the least bound of all variants that were tried, solved or not. Once the
time is up, no new variant is begun, except that the leanest one is tried if nothing fits so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from time import monotonic
from typing import Any

from sbp_core.errors import ConfigError, MemoryLimitError, SbpError
from sbp_core.graph_variant import GraphFamily, GraphVariant
from sbp_core.infer import PinValue, SharedTables, StepProblem, joint_problem
from sbp_core.planning import PlanRequest, forms_of, leaner_forms, smaller_variants, variant_words
from sbp_core.strategy import Strategy
from sbp_core.units import format_seconds
from sbp_planner.joint.near import bound_from_below
from sbp_planner.joint.search import BoundedAssignment, JointSearch, JointSettings, Values

#: The share of the remaining time that one variant may take.
_SHARE = 0.5

#: The share of the time limit, and the least seconds, that the last variant may take after it.
_LATE_SHARE, _LEAST_S = 0.1, 1.0

#: Times that differ by less than this share are equal.
_TIE = 1e-9

#: Steps of more nodes than this are very large. Their variants that gain less than this share of
#: the time of the best plan are not planned.
_MAX_NODES, _NEAR_SHARE = 10_000, 0.01

#: How many variants a line of the report names.
_NUM_NAMED = 3


class VariantOutcome(StrEnum):
    """The result for one variant."""

    BEST = "best"
    SLOWER = "slower"
    STRUCK = "struck by its bound"
    NEAR = "gains too little by its bound"
    NO_FIT = "no plan fits"
    UNSOLVED = "not solved in time"


@dataclass(slots=True, kw_only=True)
class BoundedVariant:
    """A variant, and its result so far.

    Args:
        variant: The variant.
        request: The request to plan it.
        bound_s: No assignment takes less, in seconds of a step.
        problem: All of its operators and mesh axes; None once it is settled.
        outcome: The result for it.
        is_fastest: Whether its fastest plan, whatever memory it takes, fits.
    """

    variant: GraphVariant
    request: PlanRequest
    bound_s: float
    problem: StepProblem | None = None
    outcome: VariantOutcome = VariantOutcome.UNSOLVED
    is_fastest: bool = False

    @property
    def may_gain_by_less(self) -> bool:
        """Whether a variant of this form that needs less memory could be faster than its plan."""
        return (
            self.outcome not in (VariantOutcome.STRUCK, VariantOutcome.NEAR) and not self.is_fastest
        )

    @property
    def words(self) -> str:
        """How it differs from other variants, in words."""
        form = "" if self.variant.splits_classes else ", softmaxes whole"
        return variant_words(self.variant) + form


@dataclass(frozen=True, slots=True, kw_only=True)
class _Best:
    entry: BoundedVariant
    search: JointSearch
    values: Values
    free: BoundedAssignment
    cost_s: float


def plan_family(
    request: PlanRequest,
    settings: JointSettings,
    *,
    limit_bytes: float,
    pins: Mapping[str, PinValue] | None = None,
) -> Strategy:
    """Return the cheapest strategy that fits, of all variants of a step.

    Args:
        request: The request to plan; without a family its graph is the only variant.
        settings: How to search; the time limit is for all variants together.
        limit_bytes: Memory of one rank.
        pins: The pins of the planner itself.

    Raises:
        ConfigError: a pin is invalid.
        PlanError: nothing that was found fits; names what was found.
    """
    if request.family is None:
        return JointSearch(request, settings, limit_bytes, pins or {}).run()
    search = FamilySearch(
        request=request,
        family=request.family,
        settings=settings,
        limit_bytes=limit_bytes,
        pins=pins or {},
    )
    return search.run()


@dataclass(slots=True, kw_only=True)
class FamilySearch:
    """Searches the variants of one request; the arguments are those of `plan_family`."""

    request: PlanRequest
    family: GraphFamily
    settings: JointSettings
    limit_bytes: float
    pins: Mapping[str, PinValue]
    seen: list[BoundedVariant] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)
    spared: list[BoundedVariant] = field(default_factory=list)
    left_out: list[BoundedVariant] = field(default_factory=list)
    problems: list[SbpError] = field(default_factory=list)
    refused: list[JointSearch] = field(default_factory=list)
    best: _Best | None = None
    tables: SharedTables = field(default_factory=SharedTables)
    ends_at: float = 0.0

    def run(self) -> Strategy:
        """Return the cheapest strategy that fits.

        Raises:
            ConfigError: a pin is invalid.
            PlanError: nothing fits.
        """
        self.ends_at = monotonic() + self.settings.time_limit_s
        asked = self.family.variant.num_micro_batches
        for count in dict.fromkeys((asked, *sorted(self.family.micro_batches))):
            if self.is_out_of_time and self.seen:
                self.unseen.append(count)
                continue
            forms = self._settled(self._forms(count))
            if not self.seen and isinstance(self.problems[0], ConfigError):
                raise self.problems[0]  # a wrong setting is wrong for all variants
            short = [form for form in forms if form.may_gain_by_less]
            self.spared += [form for form in forms if not form.may_gain_by_less]
            if self.is_out_of_time and self.has_leaner:
                self.left_out += short
            else:
                self._settled(self._leaner(short))
        if self.best is None and self.is_out_of_time:
            self._try_the_leanest()
        if self.best is None:
            raise self._refusal()
        return self._told(self.best)

    @property
    def has_leaner(self) -> bool:
        """Whether forms of the step may have variants that need less memory."""
        return self.family.may_recompute or self.family.may_slice

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time is up."""
        return monotonic() > self.ends_at

    @property
    def best_s(self) -> float:
        """Time of the best plan, in seconds of a step; infinite if there is none."""
        return inf if self.best is None else self.best.cost_s

    @property
    def wanted_s(self) -> float:
        """A variant whose bound is no less than this is not tried further."""
        return self.best_s * (1 - self.settings.gap) * (1 - _TIE)

    # Generators, because `_settled` records the errors of variants that do not exist.

    def _forms(self, count: int) -> Iterator[GraphVariant]:
        yield from forms_of(self.family, count)

    def _leaner(self, forms: Iterable[BoundedVariant]) -> Iterator[GraphVariant]:
        for form in forms:
            yield from leaner_forms(self.family, form.variant)

    def _settled(self, variants: Iterable[GraphVariant]) -> list[BoundedVariant]:
        """Return variants, each struck out or solved, the least floor first."""
        found = []
        try:
            for variant in variants:
                if (entry := self._posed(variant)) is not None:
                    found.append(entry)
        except SbpError as error:
            self.problems.append(error)
        self.seen += found
        for entry in sorted(found, key=lambda one: one.bound_s):
            self._settle(entry)
        return found

    def _posed(self, variant: GraphVariant) -> BoundedVariant | None:
        """Return a variant with its floor; None if there is no such variant."""
        try:
            request = self.request.of(variant)
            quiet = replace(request, progress=None)
            problem = joint_problem(
                quiet, pins=self.pins, from_axes=False, tied=self.settings.tied, tables=self.tables
            )
        except SbpError as error:
            self.problems.append(error)
            return None
        # The least time of the operators, whatever is boxed.
        floor_s = float(sum(table.min() for table in problem.unary))
        return BoundedVariant(variant=variant, request=request, bound_s=floor_s, problem=problem)

    def _settle(self, entry: BoundedVariant, *, is_last: bool = False) -> None:
        """Strike a variant out, or solve it."""
        problem, entry.problem = entry.problem, None
        if self._is_struck(entry):
            return
        left = self.ends_at - monotonic()
        if left <= 0 and not is_last and self.seen[0] is not entry:
            return
        limit_s = self.settings.time_limit_s
        seconds = max(_SHARE * left, _LATE_SHARE * limit_s, _LEAST_S)
        settings = replace(self.settings, time_limit_s=min(seconds, limit_s))
        if problem is not None and self.best is not None:
            # The bound of the answer is no higher than that of the best plan: no more to prove.
            enough_s = max(self.wanted_of(entry), min(self.best.entry.bound_s, self.wanted_s))
            proved_s = bound_from_below(
                problem, tied=settings.tied, time_limit_s=settings.proof_s, enough_s=enough_s
            )
            entry.bound_s = max(entry.bound_s, proved_s)
            if self._is_struck(entry):
                return
        request = replace(entry.request, progress=self._progress(entry))
        try:
            search = JointSearch(
                request,
                settings,
                self.limit_bytes,
                self.pins,
                tables=self.tables,
                known=None if problem is None else problem.work,
            )
            if search.is_hopeless:
                entry.outcome, entry.bound_s = VariantOutcome.NO_FIT, inf
                self.refused.append(search)
                return
            free = search.cheapest(self.best_s)
            entry.bound_s = max(entry.bound_s, search.bound_s(free))
            if self._is_struck(entry):
                return
            if free.bound_s >= self.wanted_s:
                # The bound over all signatures may be lower than that over the tried ones.
                entry.outcome, entry.is_fastest = VariantOutcome.SLOWER, True
                return
            values = search.fitting(free, self.best_s)
        except SbpError as error:
            # A plan may exist that was not found: the bound stays.
            entry.outcome = VariantOutcome.NO_FIT
            self.problems.append(error)
            return
        if values is None:
            entry.outcome = VariantOutcome.NO_FIT if self.best is None else VariantOutcome.SLOWER
            self.refused.append(search)
            return
        cost_s = search.problem.cost(values)
        entry.is_fastest = values == free.values
        entry.outcome = VariantOutcome.SLOWER
        if cost_s < self.best_s * (1 - _TIE):
            if self.best is not None:
                self.best.entry.outcome = VariantOutcome.SLOWER
            entry.outcome = VariantOutcome.BEST
            self.best = _Best(entry=entry, search=search, values=values, free=free, cost_s=cost_s)

    def wanted_of(self, entry: BoundedVariant) -> float:
        """Return the time that a variant's bound has to be below, to be tried further."""
        is_large = len(entry.request.graph.nodes) > _MAX_NODES
        return min(self.wanted_s, self.best_s * (1 - _NEAR_SHARE) if is_large else inf)

    def _is_struck(self, entry: BoundedVariant) -> bool:
        """Record and return whether the bound of a variant is reason enough to skip it."""
        if entry.bound_s >= self.wanted_s:
            entry.outcome = VariantOutcome.STRUCK
        elif entry.bound_s >= self.wanted_of(entry):
            entry.outcome = VariantOutcome.NEAR
        return entry.outcome is not VariantOutcome.UNSOLVED

    def _try_the_leanest(self) -> None:
        """Try the variant that needs least memory, if it was not tried yet."""
        try:
            leanest = list(smaller_variants(self.family))[-1:]
        except SbpError as error:
            self.problems.append(error)
            return
        for variant in leanest:
            self.unseen = [count for count in self.unseen if count != variant.num_micro_batches]
            known = next((one for one in self.seen if one.variant == variant), None)
            entry = known or self._posed(variant)
            if entry is None or entry.outcome is not VariantOutcome.UNSOLVED:
                continue
            if known is None:
                self.seen.append(entry)
            self._settle(entry, is_last=True)

    def _progress(self, entry: BoundedVariant) -> Any:
        """Return the callback for the progress of one variant, as a part of that of all."""
        say = self.request.progress
        if say is None or len(self.seen) == 1:
            return say
        done = sum(one.outcome is not VariantOutcome.UNSOLVED for one in self.seen) / len(self.seen)
        return lambda what, part: say(f"{entry.words}: {what}", done + part / len(self.seen))

    # Messages and reports

    def _refusal(self) -> SbpError:
        """Return the error for a step of which no variant fits."""
        if not self.refused:
            return self.problems[0]
        least = min(self.refused, key=lambda one: one.least_bytes)
        if len(self.seen) == 1:
            return least.refusal("take more ranks, or leave trainer.micro_batches=auto")
        late = "raise planner.time_limit_s, so that more variants are solved, or "
        is_open = (
            self.unseen
            or self.left_out
            or any(one.outcome is VariantOutcome.UNSOLVED for one in self.seen)
        )
        error = least.refusal(f"{late if is_open else ''}take more ranks")
        return error.replaced(
            MemoryLimitError, what=f"{error.what}, of {len(self.seen)} variants of the step"
        )

    def _told(self, best: _Best) -> Strategy:
        """Return the strategy, with the results of all variants in its report."""
        strategy = best.search.reported(best.values, best.free)
        strategy = replace(strategy, variant=best.entry.variant)
        if len(self.seen) == 1 and not self.unseen:
            lines = [*strategy.report["explanation"], *self._spared_lines()]
            return replace(strategy, report={**strategy.report, "explanation": lines})
        bound = min(best.cost_s, *(one.bound_s for one in self.seen))
        gap = (best.cost_s - bound) / best.cost_s if best.cost_s > 0 else 0.0
        own = strategy.report
        report = {
            "bound_s": bound,
            "gap": gap,
            "variant_bound_s": own["bound_s"],
            "variants": [
                {"variant": one.words, "bound_s": one.bound_s, "outcome": str(one.outcome)}
                for one in self.seen
            ],
            "unseen_micro_batches": list(self.unseen),
            "explanation": [*own["explanation"], *self._lines(best, bound, gap)],
        }
        return replace(strategy, report={**own, **report})

    def _lines(self, best: _Best, bound: float, gap: float) -> Iterator[str]:
        yield (
            f"{self.settings.planner}: of {len(self.seen)} variants of the step the best is "
            f"{best.entry.words}; none that was looked at takes less than {format_seconds(bound)} "
            f"(gap {gap:.2%})"
        )
        words = {
            VariantOutcome.STRUCK: "take no less, by their bounds",
            VariantOutcome.NEAR: f"gain no more than {_NEAR_SHARE:.0%}, by their bounds",
            VariantOutcome.SLOWER: "have no faster plan that was found and fits",
            VariantOutcome.NO_FIT: "have no plan that was found and fits",
            VariantOutcome.UNSOLVED: f"were not solved within {self.settings.time_limit_s:g} s",
        }
        for outcome, told in words.items():
            entries = [one for one in self.seen if one.outcome is outcome]
            if entries:
                yield f"  {len(entries)} {told}: {_named(one.words for one in entries)}"
        yield from self._spared_lines()
        if self.left_out:
            yield (
                "  recomputation and slices were not looked at in time: "
                f"{_named(one.words for one in self.left_out)}"
            )
        if self.unseen:
            counts = ", ".join(map(str, self.unseen))
            yield f"  micro-batches that were not looked at in time: {counts}"

    def _spared_lines(self) -> Iterator[str]:
        """Yield the lines about forms whose variants of less memory were not tried."""
        if self.spared and self.has_leaner:
            yield (
                "  recomputation and slices were not looked at, as the fastest plan fits or is "
                f"slower than the best: {_named(one.words for one in self.spared)}"
            )


def _named(words: Iterable[str]) -> str:
    found = list(words)
    more = f"; and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    return "; ".join(found[:_NUM_NAMED]) + more
