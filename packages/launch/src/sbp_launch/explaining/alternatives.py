"""Answer `sbp-plan explain=`: compare a plan with plans of other SBPs (layouts) of some tensors.

    explain=blocks.3.mlp.up           all legal SBPs of its output, the fastest first
    explain='blocks.3.mlp.up: S(1)'   this SBP next to the plan, and the change in communication

Each alternative plan has one more pin (a prescribed SBP). It is planned in two ways, and the faster
result is taken:

* *nearby*: only the modules of the pinned tensors and their consumers are planned again
  (`sbp_core.infer.infer_nearby`); all other decisions stay, whichever planner made them;
* *anew*: the planner plans the whole step again, with the pin among the user's pins. A planner that
  only reads its plan from a file ignores pins, so this way is skipped.

The answer is a list of lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter

from sbp_core.errors import ConfigError, SbpError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue, infer_nearby, resolve_pins
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.console import change_text, columns
from sbp_launch.explaining.compare import change_row
from sbp_launch.explaining.plan_figures import Figures, figures_of
from sbp_launch.explaining.question import Question, value_text
from sbp_launch.explaining.reasons import MovedModule, appears, moved_text, reason, refusal
from sbp_launch.planning.flow import Planned, compiled

#: Function that plans the whole step with additional pins of the user.
Replan = Callable[[Mapping[str, PinValue]], Planned]

#: With more combinations of SBPs over all mesh axes, only one axis at a time is changed.
_MOST_PRODUCTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedTensors:
    """The tensors of a graph that a pattern matches.

    Args:
        stored: Inputs; for these, a pin sets how they are stored.
        used: Values and inputs; for these, a pin sets the layout in which they are used.
    """

    stored: tuple[str, ...]
    used: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (*self.stored, *self.used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan with one more pin, or the reason why there is none.

    Args:
        value: The value of the pin.
        planned: The plan; None if no plan satisfies the pin.
        figures: The costs of the plan.
        modules: The modules that were planned again; None: the whole step.
        refused: The error, if there is no plan.
    """

    value: PinValue
    planned: Planned | None = None
    figures: Figures | None = None
    modules: tuple[str, ...] | None = None
    refused: SbpError | None = None


def tensors_of(graph: LogicalGraph, pattern: str) -> MatchedTensors:
    """Return the tensors that a pattern of pins matches.

    Raises:
        ConfigError: it matches none.
    """
    try:
        pins = resolve_pins(graph, ("any",), {pattern: "B"})
    except ConfigError as error:
        raise error.replaced(
            ConfigError,
            what=f"{pattern!r} matches no tensor and no module of {graph.name!r}",
            where="explain",
        ) from error
    return MatchedTensors(
        stored=tuple(name for name, _ in pins.storage), used=tuple(name for name, _ in pins.use)
    )


def used_sbps(graph: LogicalGraph, strategy: Strategy, tensors: MatchedTensors) -> list[NdSbp]:
    """Return the SBPs in which tensors are stored or used, the most frequent one first."""
    found = Counter(strategy.storage[name].sbp for name in tensors.stored)
    for value in tensors.used:
        for user in graph.users[value]:
            if user.is_host:
                continue
            taken = strategy.nodes[user.name].signature.inputs
            names = graph.tensor_inputs(user)
            found.update(sbp for name, sbp in zip(names, taken, strict=True) if name == value)
    return [sbp for sbp, _ in found.most_common()]


def values_of(
    graph: LogicalGraph, stages: Sequence[Placement], tensors: MatchedTensors, now: NdSbp | None
) -> list[str]:
    """Return the values of pins to try: every SBP of the tensors.

    Args:
        graph: The graph of the step.
        stages: Placement of each stage.
        tensors: The tensors of the pattern.
        now: Their present SBP. If there are very many SBPs, only those that differ from it on one
            axis are returned.
    """
    num_dims = min(len(graph.tensor(name).shape) for name in tensors.names)
    entries = ["B", *(f"S({dim})" for dim in range(num_dims)), *["P"] * (not tensors.stored)]
    by_axis = [entries if size > 1 else ["B"] for size in stages[0].mesh_shape]
    found = [", ".join(parts) for parts in product(*by_axis)]
    if len(found) <= _MOST_PRODUCTS or now is None:
        return found
    kept = [str(entry) for entry in now]
    return list(
        dict.fromkeys(
            ", ".join([*kept[:axis], entry, *kept[axis + 1 :]])
            for axis, possible in enumerate(by_axis)
            for entry in possible
        )
    )


def alternative(
    planned: Planned, pattern: str, value: PinValue, replan: Replan | None
) -> Alternative:
    """Return the faster of the plans with a pin.

    Args:
        planned: The present plan.
        pattern: Pattern of the pin.
        value: Value of the pin.
        replan: Plans the whole step; None to try the nearby plan only.
    """
    made: list[tuple[Figures, Alternative]] = []
    refused: list[SbpError] = []

    def add(found: Planned, modules: tuple[str, ...] | None) -> None:
        figures = figures_of(found)
        one = Alternative(value=value, planned=found, figures=figures, modules=modules)
        made.append((figures, one))

    try:
        settings, graph = planned.settings, planned.graph
        near = infer_nearby(settings.request(graph), planned.strategy, {pattern: value})
        add(compiled(graph, near.strategy, settings), near.modules)
    except SbpError as error:
        refused.append(error)
    try:
        if replan is not None and holds(anew := replan({pattern: value}), pattern, value):
            add(anew, None)
    except SbpError as error:
        refused.append(error)
    if not made:
        return Alternative(value=value, refused=refused[0])
    # A plan that fits into memory first, then the faster one; if equal, the nearby plan.
    return min(made, key=lambda pair: (not pair[0].fits, pair[0].step_s))[1]


def holds(planned: Planned, pattern: str, value: PinValue) -> bool:
    """Return whether a plan satisfies a pin."""
    graph, strategy = planned.graph, planned.strategy
    pins = resolve_pins(graph, strategy.stages[0].axes, {pattern: value})
    return all(
        strategy.storage[name].sbp[axis] == pin.entry for (name, axis), pin in pins.storage.items()
    ) and all(
        sbp[axis] == pin.entry
        for (used, axis), pin in pins.use.items()
        for sbp in used_sbps(graph, strategy, MatchedTensors(stored=(), used=(used,)))
    )


#: All SBPs of a tensor are planned anew if that is expected to take at most this time, in seconds.
MOST_PLANNING_S = 30.0

#: Time limit in seconds, after which the remaining SBPs are skipped.
MOST_S = 120.0

#: Most boxing steps (communication) that are listed as added or removed; most names of tensors.
_MOST_MOVES, _MOST_NAMES = 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest:
    """The input of an answer: the plan, and a function to plan again.

    Args:
        planned: The present plan.
        replan: Plans the whole step with additional pins of the user.
        planning_s: Time that planning took, in seconds.
    """

    planned: Planned
    replan: Replan
    planning_s: float


def explain_lines(
    question: Question, asked: ExplainRequest, progress: Callable[[str], None] = lambda what: None
) -> Iterator[str]:
    """Yield the lines of the answer.

    Raises:
        ConfigError: the pattern matches no tensor.
    """
    planned = asked.planned
    tensors = tensors_of(planned.graph, question.pattern)
    now = used_sbps(planned.graph, planned.strategy, tensors)
    how = f"{'is' if len(tensors.names) == 1 else 'are'} {'stored' if tensors.stored else 'used'}"
    yield f"explain {question.text}: how {_first(tensors.names)} {how}"
    axes = ", ".join(planned.strategy.stages[0].axes)
    yield f"  in this plan ({axes}): {_sbps(now)}"
    if question.value is None:
        yield from _all_ways(question.pattern, tensors, now, asked, progress)
        return
    progress(question.text)
    found = alternative(planned, question.pattern, question.value, asked.replan)
    yield from _comparison_lines(found, asked)


def _comparison_lines(found: Alternative, asked: ExplainRequest) -> Iterator[str]:
    """Yield a comparison of one alternative with the plan."""
    planned, before = asked.planned, figures_of(asked.planned)
    if found.planned is None or found.figures is None:
        assert found.refused is not None, "what was not made was refused"
        yield f"  {refusal(found.refused)}"
        if found.refused.todo:
            yield f"  to fix it: {found.refused.todo}"
        return
    after = found.figures
    yield f"  {reason(planned, found.planned, before, after)}"
    yield ""
    row = partial(change_row, before=before, after=after)
    rows = [
        ["", "this plan", "with the pin", "change"],
        row("predicted step", value=lambda one: one.step_s, text=format_seconds),
        row("a rank computes", value=lambda one: one.computing_s, text=format_seconds),
        row("a rank boxes", value=lambda one: one.boxing_s, text=format_seconds),
        row("a rank sends", value=lambda one: one.sent_bytes / one.num_ranks, text=format_bytes),
    ]
    if before.fullest is not None and after.fullest is not None:
        old, new = before.fullest.peak, after.fullest.peak
        rows.append(["fullest rank", *map(format_bytes, (old, new)), change_text(old, new)])
    yield from (f"  {line}" for line in columns(rows))
    modules = planned.module_rows, found.planned.module_rows
    yield from _moves("additional or different communication", appears(*modules))
    yield from _moves("no longer communicated", appears(*reversed(modules)))
    if found.modules is None:
        planner = planned.strategy.planner
        yield f"  planned again: the whole step, by planner {planner} with this pin"
    else:
        names = _first([name or "(root)" for name in found.modules])
        yield f"  planned again: {names} and readers of the results; the rest is as in this plan"


def _first(names: Sequence[str]) -> str:
    """Return the first names, and the number of the remaining ones."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _moves(head: str, moved: Sequence[MovedModule]) -> Iterator[str]:
    """Yield lines about communication that occurs in one plan only."""
    if not moved:
        return
    yield f"  {head}:"
    for one in moved[:_MOST_MOVES]:
        yield f"    {moved_text(one)}"
    if more := moved[_MOST_MOVES:]:
        size = sum(one.move.bytes_of_a_rank for one in more)
        yield f"    and {len(more)} more, {format_bytes(size)} from a rank"


def _all_ways(
    pattern: str,
    tensors: MatchedTensors,
    now: Sequence[NdSbp],
    asked: ExplainRequest,
    progress: Callable[[str], None],
) -> Iterator[str]:
    """Yield a table of all SBPs of some tensors, the fastest first."""
    planned, before = asked.planned, figures_of(asked.planned)
    planner, first = planned.strategy.planner, now[0] if now else None
    values = values_of(planned.graph, planned.strategy.stages, tensors, first)
    values = [value for value in values if len(now) != 1 or value != str(first)]
    if not values:
        yield "  there is no other way to split this on this mesh"
        return
    anew = asked.planning_s * len(values) <= MOST_PLANNING_S
    replan = asked.replan if anew else None
    ways: list[Alternative] = []
    begun_s = perf_counter()
    for value in values:
        if perf_counter() - begun_s > MOST_S:
            break
        progress(f"{pattern}: {value}")
        ways.append(alternative(planned, pattern, value, replan))
    made = [(one, one.figures) for one in ways if one.figures is not None]
    made.sort(key=lambda pair: (not pair[1].fits, pair[1].step_s))
    rows = [["", "SBP", "step", "", "a rank sends", "fullest rank", "why"]]
    rows.append(_row("*", _sbps(now), before, before, "this plan"))
    for one, after in made:
        assert one.planned is not None, "what has figures has a plan"
        told = reason(planned, one.planned, before, after)
        how = "" if one.modules is None else "nearby; " if replan else ""
        rows.append(_row("", f"({value_text(one.value)})", before, after, f"{how}{told}"))
    yield ""
    # The last column is printed on a line of its own, because its texts are long.
    heads = columns([row[:-1] for row in rows], left=2)
    yield heads[0]
    for line, row in zip(heads[1:], rows[1:], strict=True):
        yield line
        yield f"      {row[-1]}"
    reasons = defaultdict[str, list[str]](list)
    for one in ways:
        if one.refused is not None:
            # Without the pin, which the error message repeats.
            _, is_pin, rest = one.refused.what.partition("' asks that ")
            reasons[rest if is_pin else one.refused.what].append(f"({value_text(one.value)})")
    for text, refused in reasons.items():
        yield f"not legal: {', '.join(refused)}: {text}"
    if left := values[len(ways) :]:
        named = ", ".join(f"({value})" for value in left)
        yield f"not tried within {MOST_S:.0f} s: {named}"
    if replan is not None:
        yield (
            f"each is the faster of two plans: planner {planner} plans the whole step with that "
            "pin, or (nearby) only the pinned part, and the rest is as in this plan"
        )
    else:
        yield (
            "each changes only the pinned part, and the rest is as in this plan, because planner "
            f"{planner} takes {format_seconds(asked.planning_s)} a plan; "
            f"explain='{pattern}: SBP' plans the whole step with one of them"
        )


def _row(mark: str, sbp: str, before: Figures, after: Figures, told: str) -> list[str]:
    peak = "?" if after.fullest is None else format_bytes(after.fullest.peak)
    change = "" if after is before else change_text(before.step_s, after.step_s)
    sent = format_bytes(after.sent_bytes / after.num_ranks)
    return [mark, sbp, format_seconds(after.step_s), change, sent, peak, told]


def _sbps(found: Sequence[NdSbp]) -> str:
    return " or ".join(f"({sbp})" for sbp in found) or "it is used nowhere"
