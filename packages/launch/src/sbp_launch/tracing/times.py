"""Break down the time of traced steps for each rank: computing, boxing (communication), waiting.

A span of a collective includes the wait for slower ranks. The wait ends when the last rank begins:

    rank 0   |boxing ===============|     waits until rank 1 begins, then data move
    rank 1            |boxing ======|     began last: does not wait

For an asynchronous collective, the same holds for the span that awaits its end:

    rank 0   |begin| compute |end =========|     waits until rank 1 begins, then data move
    rank 1                        |begin|...
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sbp_core.compile import BoxingActor, Collective, PhysicalPlan, Receive
from sbp_core.runtime import Span, SpanKind
from sbp_core.units import format_seconds
from sbp_launch.console import columns

#: Prefix of `Span.waits_for` of spans that await the end of asynchronous boxing.
END_OF = "the end of "

#: Largest number of ranks that are printed.
_MOST_RANKS = 16

#: Titles of the table's columns.
_HEADS: tuple[str, ...] = (
    "rank",
    "step",
    "compute",
    "boxing",
    "for others",
    "for its turn",
    "rest",
    "most for",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastArrival:
    """The end of a boxing call's wait, in nanoseconds, and the rank that came last."""

    until_ns: int
    rank: int


def last_arrivals(plan: PhysicalPlan, spans: Sequence[Span]) -> Mapping[Span, LastArrival]:
    """Return the last arrival for each boxing call, or wait for its end, that had to wait."""
    senders: dict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
    for link in plan.links:
        senders[link.receiver].append(link.sender)
    firings = {
        (span.step, span.micro_batch, span.rank, span.actor): span
        for span in spans
        if span.kind is SpanKind.FIRING
    }
    calls = {span: [key] for key, span in firings.items()}
    begun: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for span in sorted(spans, key=lambda span: span.begin_ns):
        if span.kind is SpanKind.FIRING:
            begun[span.step, span.rank][span.actor] = span.micro_batch
        elif span.waits_for.startswith(END_OF):
            calls[span] = [
                (span.step, index, span.rank, name)
                for name, index in begun[span.step, span.rank].items()
                if name in span.waits_for
            ]
            for key in calls[span]:
                calls.pop(firings[key], None)  # only its begin; the wait is a span of its own
    found: dict[Span, LastArrival] = {}
    waits = [(span, key) for span, keys in calls.items() for key in keys]
    for span, (step, index, rank, name) in waits:
        actor = plan.by_rank[rank].by_name[name]
        if isinstance(actor, Collective):
            group = plan.steps[actor.step].group(rank)
            others = [(other, name) for other in group if other != rank]
        elif isinstance(actor, Receive):
            others = senders[rank, name]
        else:
            continue
        came = [
            (firings[step, index, *other].begin_ns, other[0])
            for other in others
            if (step, index, *other) in firings
        ]
        begin_ns, last = max(came, default=(0, rank))
        until_ns = min(begin_ns, span.end_ns)
        if until_ns > max(span.begin_ns, found[span].until_ns if span in found else 0):
            found[span] = LastArrival(until_ns=until_ns, rank=last)
    return found


@dataclass(slots=True, kw_only=True)
class RankTimes:
    """Time breakdown of one thread of a rank, in nanoseconds, over all traced steps.

    Args:
        steps: Duration of the steps, from the first firing to the last one.
        compute: Time in firings without communication.
        boxing: Time in boxing after the last rank has begun.
        waiting: Time waiting for other ranks, and for data and credits (free places) of threads.
        turn: Time waiting until another rank of the same process has computed.
        late: The part of `waiting` for each rank that was waited for.
    """

    steps: int = 0
    compute: int = 0
    boxing: int = 0
    waiting: int = 0
    turn: int = 0
    late: Counter[int] = field(default_factory=Counter)

    @property
    def rest(self) -> int:
        """Time between firings."""
        return self.steps - self.compute - self.boxing - self.waiting - self.turn


def rank_times(plan: PhysicalPlan, spans: Sequence[Span]) -> dict[tuple[int, str], RankTimes]:
    """Return the time breakdown of each (rank, thread)."""
    late, found = last_arrivals(plan, spans), defaultdict[tuple[int, str], RankTimes](RankTimes)
    extents: dict[tuple[int, str, int], tuple[int, int]] = {}
    for span in spans:
        if span.kind is SpanKind.OPERATOR:
            continue  # a part of a firing
        times, took = found[span.rank, span.thread], span.end_ns - span.begin_ns
        key = (span.rank, span.thread, span.step)
        begin_ns, end_ns = extents.get(key, (span.begin_ns, span.end_ns))
        extents[key] = (min(begin_ns, span.begin_ns), max(end_ns, span.end_ns))
        is_call = span.waits_for.startswith(END_OF)
        if span.kind is SpanKind.BLOCKED and not is_call:
            times.waiting += took
        elif span.kind is SpanKind.TURN:
            times.turn += took
            times.compute -= took  # it is within a firing
        elif is_call or isinstance(plan.by_rank[span.rank].by_name[span.actor], BoxingActor):
            waited = late[span].until_ns - span.begin_ns if span in late else 0
            times.waiting += waited
            times.boxing += took - waited
            if waited:
                times.late[late[span].rank] += waited
        else:
            times.compute += took
    for (rank, thread, _), (begin_ns, end_ns) in extents.items():
        found[rank, thread].steps += end_ns - begin_ns
    return dict(sorted(found.items()))


def time_table(plan: PhysicalPlan, spans: Sequence[Span], file: str = "the trace") -> list[str]:
    """Return the lines of a table with the time breakdown of the traced steps, by rank.

    Args:
        plan: The plan that ran.
        spans: The spans of all ranks; not empty.
        file: Name of the file with all ranks, if there are too many to print.
    """
    times = rank_times(plan, spans)
    steps = sorted({span.step + 1 for span in spans})
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
    has_threads = len(times) > len({rank for rank, _ in times})
    rows = [_HEADS]
    for (rank, thread), one in times.items():
        parts = (one.steps, one.compute, one.boxing, one.waiting, one.turn, one.rest)
        late = one.late.most_common(1)
        rows.append(
            (
                f"{rank} {thread}" if has_threads else str(rank),
                *(format_seconds(part / len(steps) * 1e-9) if part > 0 else "-" for part in parts),
                f"rank {late[0][0]}" if late else "-",
            )
        )
    # Columns without any time are left out.
    shown = [
        column
        for column in range(len(_HEADS))
        if any(row[column] not in ("", "-") for row in rows[1:])
    ]
    printed = [[row[column] for column in shown] for row in rows[: _MOST_RANKS + 1]]
    lines = [f"where the time of a step went (mean of {which})"]
    lines += [f"  {line}" for line in columns(printed, left=0)]
    if len(rows) > _MOST_RANKS + 1:
        lines.append(f"  and {len(rows) - 1 - _MOST_RANKS} more in {file}")
    return lines
