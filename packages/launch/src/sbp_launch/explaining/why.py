"""Answer `why=`: the plan beside what it would be with other SBPs of some tensors.

    why=blocks.3.mlp.up           every legal way to cut what leaves it, what is fastest first
    why='blocks.3.mlp.up: S(1)'   this one beside the plan, and what travels more and less

What is printed is lines; `alternatives` makes the plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from sbp_core.sbp import NdSbp
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.console import change_text, columns
from sbp_launch.explaining.alternatives import (
    Alternative,
    Replan,
    Tensors,
    alternative,
    present,
    tensors_of,
    values_of,
)
from sbp_launch.explaining.figures import Figures, change_row, figures_of
from sbp_launch.explaining.question import Question, value_text
from sbp_launch.explaining.reasons import MovedModule, appears, moved_text, reason, refusal
from sbp_launch.planning.flow import Planned

#: All ways of a tensor are planned anew if that takes no longer than so many seconds.
MOST_PLANNING_S = 30.0

#: After so many seconds no further way is looked at.
MOST_S = 120.0

#: Most boxing that is listed as more or less, and most tensors that are named.
_MOST_MOVES, _MOST_NAMES = 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is needed to answer: the plan, and how to plan again.

    Args:
        planned: The plan as it is.
        replan: Plans the whole step with more pins of the user.
        planning_s: What planning took, in seconds.
    """

    planned: Planned
    replan: Replan
    planning_s: float


def why_lines(
    question: Question, asked: Asked, progress: Callable[[str], None] = lambda what: None
) -> Iterator[str]:
    """Yield the lines of the answer.

    Raises:
        ConfigError: the pattern matches nothing.
    """
    planned = asked.planned
    tensors = tensors_of(planned.graph, question.pattern)
    now = present(planned.graph, planned.strategy, tensors)
    how = f"{'is' if len(tensors.names) == 1 else 'are'} {'stored' if tensors.stored else 'used'}"
    yield f"why {question.text}: how {_first(tensors.names)} {how}"
    axes = ", ".join(planned.strategy.stages[0].axes)
    yield f"  in this plan ({axes}): {_sbps(now)}"
    if question.value is None:
        yield from _all_ways(question.pattern, tensors, now, asked, progress)
        return
    progress(question.text)
    found = alternative(planned, question.pattern, question.value, asked.replan)
    yield from _beside(found, asked)


def _beside(found: Alternative, asked: Asked) -> Iterator[str]:
    """Yield one alternative beside the plan."""
    planned, before = asked.planned, figures_of(asked.planned)
    if found.planned is None or found.figures is None:
        assert found.refused is not None, "what was not made was refused"
        yield f"  {refusal(found.refused)}"
        if found.refused.todo:
            yield f"  to mend it: {found.refused.todo}"
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
    yield from _moves("travels more, or otherwise", appears(*modules))
    yield from _moves("travels no more", appears(*reversed(modules)))
    if found.modules is None:
        planner = planned.strategy.planner
        yield f"  planned anew: the whole step, by planner {planner} with this pin"
    else:
        names = _first([name or "(root)" for name in found.modules])
        yield f"  planned anew: {names}, and what takes that; all else is as in this plan"


def _first(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _moves(head: str, moved: Sequence[MovedModule]) -> Iterator[str]:
    """Yield what travels in one plan alone."""
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
    tensors: Tensors,
    now: Sequence[NdSbp],
    asked: Asked,
    progress: Callable[[str], None],
) -> Iterator[str]:
    """Yield a table of all ways to cut some tensors, what is fastest first."""
    planned, before = asked.planned, figures_of(asked.planned)
    planner, first = planned.strategy.planner, now[0] if now else None
    values = values_of(planned.graph, planned.strategy.stages, tensors, first)
    values = [value for value in values if len(now) != 1 or value != str(first)]
    if not values:
        yield "  there is no other way to cut that on this mesh"
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
    # The last column is below the others, as its texts are long.
    heads = columns([row[:-1] for row in rows], left=2)
    yield heads[0]
    for line, row in zip(heads[1:], rows[1:], strict=True):
        yield line
        yield f"      {row[-1]}"
    reasons = defaultdict[str, list[str]](list)
    for one in ways:
        if one.refused is not None:
            # Without the pin, which the refusal repeats.
            _, is_pin, rest = one.refused.what.partition("' asks that ")
            reasons[rest if is_pin else one.refused.what].append(f"({value_text(one.value)})")
    for text, refused in reasons.items():
        yield f"not legal: {', '.join(refused)}: {text}"
    if left := values[len(ways) :]:
        named = ", ".join(f"({value})" for value in left)
        yield f"not looked at, as {MOST_S:.0f} s were over: {named}"
    if replan is not None:
        yield (
            f"each is the faster of two plans: of the whole step by planner {planner} with "
            "that pin, or (nearby) of what the pin is about, all else as in this plan"
        )
    else:
        yield (
            "each changes what the pin is about alone, all else is as in this plan, since planner "
            f"{planner} takes {format_seconds(asked.planning_s)} a plan; "
            f"why='{pattern}: SBP' plans the whole step with one of them"
        )


def _row(mark: str, sbp: str, before: Figures, after: Figures, told: str) -> list[str]:
    peak = "?" if after.fullest is None else format_bytes(after.fullest.peak)
    change = "" if after is before else change_text(before.step_s, after.step_s)
    sent = format_bytes(after.sent_bytes / after.num_ranks)
    return [mark, sbp, format_seconds(after.step_s), change, sent, peak, told]


def _sbps(found: Sequence[NdSbp]) -> str:
    return " or ".join(f"({sbp})" for sbp in found) or "it is used nowhere"
