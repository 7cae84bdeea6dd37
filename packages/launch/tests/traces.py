"""Traces that no run has made: every firing of a plan, one after the other on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

from sbp_core.compile import Compute, PhysicalPlan
from sbp_core.runtime import BatchIs, Number, Session, Span, SpanKind, StepResult
from sbp_core.tensor import Tensor
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime, ReferenceSession

#: What a firing takes, in nanoseconds.
FIRING_NS = 10_000


def spans_of(plan: PhysicalPlan, step: int = 0, late_ns: int = 0) -> Iterator[Span]:
    """Yield a span for each firing; each rank begins later than the one before."""
    for part in plan.ranks:
        for thread, order in part.orders.items():
            begin_ns = step * 10**9 + part.rank * late_ns
            for number, (actor, index) in zip(count(), order, strict=False):
                begin = begin_ns + number * FIRING_NS
                yield Span(
                    SpanKind.FIRING, part.rank, thread, step, actor, index, begin, begin + FIRING_NS
                )


def operators_of(plan: PhysicalPlan, spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the operators of the firings among these spans, all of the same length."""
    for span in spans:
        actor = plan.by_rank[span.rank].by_name[span.actor]
        if span.kind is SpanKind.FIRING and isinstance(actor, Compute):
            each_ns = (span.end_ns - span.begin_ns) // len(actor.instructions)
            for number, entry in enumerate(actor.instructions):
                begin_ns = span.begin_ns + number * each_ns
                yield replace(
                    span,
                    kind=SpanKind.OPERATOR,
                    node=entry.node,
                    begin_ns=begin_ns,
                    end_ns=begin_ns + each_ns,
                )


class TracingRuntime(ReferenceRuntime):
    """The reference runtime, whose sessions note made-up spans."""

    traces = True
    traces_operators = True

    def start(self, plan, states, backend=None, ranks=None):
        return _TracingSession(plan, states, self.config)


class _TracingSession(ReferenceSession):
    steps = 0

    def step(
        self,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        *,
        batch_is: BatchIs = "global",
    ) -> StepResult:
        result = super().step(batch, scalars, batch_is=batch_is)
        if self.trace is not None:
            spans = list(spans_of(self.plan, self.steps))
            self.trace.spans.extend(spans)
            if self.trace.operators:
                self.trace.spans.extend(operators_of(self.plan, spans))
        self.steps += 1
        return result


def start_traced(plan: PhysicalPlan, states: Mapping[str, Tensor]) -> Session:
    """Start a session that notes made-up spans."""
    return _TracingSession(plan, states, ReferenceConfig())
