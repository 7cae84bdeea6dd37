"""Trace some steps of a run, and leave the trace as a file that viewers draw.

    with StepTracer(planned, backend, range(10, 13), folder) as tracer:
        for number in range(1, 101):
            with tracer.step(number, session):
                session.step(batch, scalars)
            tracer.finish(number)
    print(*tracer.lines)

The steps that are not traced run as without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from sbp_core.boxing import BoxingBackend
from sbp_core.runtime import Session, Span, Trace, measured_operators
from sbp_launch.machine import describe_machine
from sbp_launch.planning.flow import Planned
from sbp_launch.run.folder import writing
from sbp_launch.tracing.events import Traced, trace_json
from sbp_launch.tracing.gather import Part, gather_parts, own_part, with_one_clock
from sbp_launch.tracing.operators import OPERATORS, OperatorTimes
from sbp_launch.tracing.times import time_table
from sbp_torch.memory import MemoryMeter

#: The file of a run folder that holds the trace.
TRACE = "trace.json"

#: The file with the trace of one rank, of a run that ended before the traces were put together.
PART = "logs/trace_rank_{rank}.json"


class StepTracer:
    """Traces chosen steps of a session, and writes the trace after the last of them.

    Its `lines` say afterwards where the time went, and where the trace is; they are empty in
    processes that do not write it.

    Args:
        planned: What the session runs.
        backend: Of the session.
        steps: To trace, counted from 1; empty for none.
        folder: Of the run.
        operators_of: Name of the boxing backend, if operators are to be traced, too; what they take
            is then left in the folder.
    """

    def __init__(
        self,
        planned: Planned,
        backend: BoxingBackend,
        steps: range,
        folder: Path,
        operators_of: str = "",
    ) -> None:
        self.planned, self.plan, self.backend = planned, planned.plan, backend
        self.steps, self.folder, self.operators_of = steps, folder, operators_of
        self.lines: list[str] = []
        self._ranks = tuple(part.rank for part in self.plan.ranks)
        self._meter: MemoryMeter | None = None
        self._trace: Trace | None = None

    def __enter__(self) -> StepTracer:
        return self

    def __exit__(self, *_: object) -> None:
        """Write what was traced of a run that ends before all of it is."""
        if self._trace is not None:
            # What ended the run is what is told.
            with suppress(OSError):
                self._write([own_part(self._trace, self._ranks)])

    @contextmanager
    def step(self, number: int, session: Session) -> Iterator[None]:
        """Trace the step that is run in the block, if it is to be."""
        if number not in self.steps:
            yield
            return
        if self._trace is None:
            if self.backend.spans_processes:
                self._ranks = self.backend.local_ranks()
            self._meter = MemoryMeter(self.plan, self._ranks)
            self._meter.note_states(session)
            self._trace = Trace(self._meter, operators=bool(self.operators_of))
        session.trace = self._trace
        try:
            yield
        finally:
            session.trace = None

    def finish(self, number: int) -> None:
        """Write the trace behind the last step of it; all processes call this behind each step.

        Raises:
            BoxingError: another rank did not come with its trace.
            RunError: the trace cannot be written.
        """
        if self._trace is None or number != self.steps[-1]:
            return
        own, parts = own_part(self._trace, self._ranks), []
        self._trace, self._meter = None, None
        if self.backend.spans_processes:
            parts = gather_parts(self.backend, [part.rank for part in self.plan.ranks], own)
        if self.plan.ranks[0].rank in own.ranks:
            with writing(self.folder):
                self._write(parts or [own])

    def _write(self, parts: Sequence[Part]) -> None:
        """Write the trace of these processes, and say what is in it."""
        parts, clock_error_s = with_one_clock(parts)
        spans = [span for part in parts for span in part.spans]
        if not spans:
            return
        traced = Traced(
            plan=self.plan,
            graph=self.planned.graph,
            spans=spans,
            held=[held for part in parts for held in part.held],
            hosts={rank: f"{p.host}, process {p.process}" for p in parts for rank in p.ranks},
            clock_error_s=clock_error_s,
        )
        file = TRACE
        if len(traced.hosts) < len(self.plan.ranks):
            file = PART.format(rank=min(traced.hosts))
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace_json(traced)), encoding="utf-8")
        self.lines = [
            *time_table(self.plan, spans, file),
            f"trace of these steps: {file}, for https://ui.perfetto.dev or chrome://tracing",
        ]
        if self.operators_of and file == TRACE:
            self._write_operators(spans)

    def _write_operators(self, spans: Sequence[Span]) -> None:
        found = OperatorTimes(
            backend=self.operators_of,
            num_ranks=len(self.plan.ranks),
            machine=describe_machine(torch.__version__),
            operators=measured_operators(self.planned.graph, self.planned.strategy, spans),
        )
        found.save(self.folder / OPERATORS)
        self.lines.append(
            f"times of {len(found.operators)} calls of operators: {OPERATORS}; plan with them: "
            f"sbp-calibrate ops={self.folder} out=CLUSTER_FILE"
        )
