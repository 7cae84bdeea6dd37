"""Where the time of traced steps went, by rank: computing, boxing, waiting; and by operator.

A boxing call does not say how long it waited for the others. It is told from when they came:

    rank 0   |boxing ===============|     waits for rank 1 until it comes, then data moves
    rank 1            |boxing ======|     came last: waits for nobody

Where a call is begun, and its end awaited later, the same is told of that wait:

    rank 0   |begin| compute |end =========|     waits for rank 1 until it begins, then data moves
    rank 1                        |begin|...
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sbp_core.compile import BoxingActor, Collective, PhysicalPlan, Receive
from sbp_core.errors import ConfigError
from sbp_core.operators import MeasuredOperator
from sbp_core.runtime import Span, SpanKind
from sbp_core.serialize import Document
from sbp_core.units import format_seconds
from sbp_launch.console import columns

#: How a span begins to say that it waits for the end of boxing that was begun before.
END_OF = "the end of "

#: Most ranks that are printed one by one.
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
    """What a boxing call waited for: until when, in nanoseconds, and the rank that came last."""

    until_ns: int
    rank: int


def late_ranks(plan: PhysicalPlan, spans: Sequence[Span]) -> Mapping[Span, LastArrival]:
    """Return for each boxing call, and wait for the end of one, what it waited for."""
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
                calls.pop(firings[key], None)  # which only began what is waited for here
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
    """Where the time of one thread of a rank went, in nanoseconds, over all traced steps.

    Args:
        steps: From the first firing of each step to its last one.
        compute: In firings that box nothing.
        boxing: In boxing, from when the last rank has come.
        waiting: For other ranks, and for data and credits of other threads.
        turn: For another rank of the process to have computed.
        late: Of `waiting`, what was for each rank.
    """

    steps: int = 0
    compute: int = 0
    boxing: int = 0
    waiting: int = 0
    turn: int = 0
    late: Counter[int] = field(default_factory=Counter)

    @property
    def rest(self) -> int:
        """What is between firings."""
        return self.steps - self.compute - self.boxing - self.waiting - self.turn


def rank_times(plan: PhysicalPlan, spans: Sequence[Span]) -> dict[tuple[int, str], RankTimes]:
    """Return where the time of each rank and thread went."""
    late, found = late_ranks(plan, spans), defaultdict[tuple[int, str], RankTimes](RankTimes)
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
    """Return lines that say where the time of the traced steps went, by rank.

    Args:
        plan: What ran.
        spans: Of all ranks; not empty.
        file: Where the rest can be seen, if there are many ranks.
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
    # A column in which nothing happened says nothing.
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


#: The file of a run folder that holds the times.
OPERATORS = "operators.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """What the operators of a run took.

    Args:
        backend: Its boxing backend.
        num_ranks: Its ranks, which shared the machine.
        machine: See `Cluster.machine`.
        operators: Each call of an operator once.
    """

    backend: str
    num_ranks: int
    machine: Mapping[str, str]
    operators: tuple[MeasuredOperator, ...]

    def save(self, path: Path) -> None:
        """Write the file of a run folder."""
        OPERATOR_TIMES.write(self, path)

    @classmethod
    def load(cls, path: Path) -> OperatorTimes:
        """Read what `save` wrote.

        Raises:
            ConfigError: there is no such file, or it is another one.
        """
        return OPERATOR_TIMES.read(path)


OPERATOR_TIMES: Document[OperatorTimes] = Document(
    kind=OperatorTimes,
    format="sbp-operators",
    version=1,
    todo="trace the operators of a run: sbp-train trainer.trace=5..14 trainer.trace_operators=true",
    error=ConfigError,
)
