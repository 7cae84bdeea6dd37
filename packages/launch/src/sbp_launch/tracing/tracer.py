"""Trace some steps of a run, and write the trace into a file for viewers.

    with StepTracer(planned, backend, range(10, 13), folder) as tracer:
        for number in range(1, 101):
            with tracer.step(number, session):
                session.step(batch, scalars)
            tracer.finish(number)
    print(*tracer.lines)

The other steps run as without tracing.

The traces of several processes are gathered through their boxing backend. The clocks of hosts
differ. They are aligned by small exchanges, which end on all ranks at about the same time: the
median difference of these times is the offset of a host from the host of the first rank.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from sbp_core.boxing import BoxingBackend
from sbp_core.runtime import MemorySample, Session, Span, SpanKind, Trace, measured_operators
from sbp_launch.machine import describe_machine
from sbp_launch.planning.flow import Planned
from sbp_launch.run.folder import writing
from sbp_launch.tracing.events import Traced, trace_json
from sbp_launch.tracing.operator_times import OPERATOR_TIMES, OPERATORS, OperatorTimes
from sbp_launch.tracing.times import time_table
from sbp_torch.boxing.processes import gather_texts
from sbp_torch.memory import MemoryMeter

#: Number of exchanges that compare the clocks.
_ROUNDS = 9

#: Seconds that a rank may wait for other ranks, which may still be computing.
_DEADLINE_S = 120.0

#: Bytes of the text that holds the length of a trace.
_SIZE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTrace:
    """The trace of one process.

    Args:
        ranks: The ranks of the process.
        host: Name of its machine.
        process: Its process id.
        spans, held: Recorded time spans and memory samples.
        exits_ns: The times at which the exchanges that compare the clocks ended.
    """

    ranks: tuple[int, ...]
    host: str
    process: int
    spans: tuple[Span, ...]
    held: tuple[MemorySample, ...]
    exits_ns: tuple[int, ...] = ()


def own_part(trace: Trace, ranks: Sequence[int]) -> ProcessTrace:
    """Return the trace that this process has recorded."""
    return ProcessTrace(
        ranks=tuple(ranks),
        host=platform.node(),
        process=os.getpid(),
        spans=tuple(trace.spans),
        held=tuple(trace.held),
    )


def gather_parts(
    backend: BoxingBackend, ranks: Sequence[int], own: ProcessTrace
) -> list[ProcessTrace]:
    """Return the traces of all processes; all of them call this between two steps.

    Args:
        backend: The open backend, with one rank in each process.
        ranks: All ranks of the run.
        own: The trace of this process.

    Raises:
        BoxingError: a rank did not answer.
    """
    communicator = backend.communicator(own.ranks[0])

    def exchange(text: str, what: str, width_bytes: int) -> list[str]:
        found = gather_texts(
            communicator, ranks, text, tag=what, width_bytes=width_bytes, deadline_s=_DEADLINE_S
        )
        return [found[rank] for rank in ranks]

    exits_ns = []
    for index in range(_ROUNDS):
        exchange("", f"comparison of clocks {index}", 1)
        exits_ns.append(Trace.now_ns())
    text = pack(replace(own, exits_ns=tuple(exits_ns)))
    sizes = exchange(str(len(text)), "sizes of traces", _SIZE_BYTES)
    return [unpack(part) for part in exchange(text, "traces", max(map(int, sizes)))]


def with_one_clock(parts: Sequence[ProcessTrace]) -> tuple[list[ProcessTrace], float]:
    """Convert all times to the clock of the first process's host.

    Returns:
        The converted traces, and the largest remaining error in seconds; 0.0 on one host.
    """
    first, error_ns, moved = parts[0], 0.0, []
    for part in parts:
        if part.host == first.host:
            moved.append(part)
            continue
        ahead = [own - its for own, its in zip(part.exits_ns, first.exits_ns, strict=True)]
        offset_ns = round(median(ahead))
        error_ns = max(error_ns, (max(ahead) - min(ahead)) / 2)
        spans = tuple(
            replace(span, begin_ns=span.begin_ns - offset_ns, end_ns=span.end_ns - offset_ns)
            for span in part.spans
        )
        held = tuple(replace(one, time_ns=one.time_ns - offset_ns) for one in part.held)
        moved.append(replace(part, spans=spans, held=held))
    return moved, error_ns * 1e-9


def pack(part: ProcessTrace) -> str:
    """Return a process's trace as text."""
    value = {
        "ranks": part.ranks,
        "host": part.host,
        "process": part.process,
        "spans": [
            [
                str(span.kind), span.rank, span.thread, span.step, span.actor, span.micro_batch,
                span.begin_ns, span.end_ns, span.waits_for, span.node,
            ]
            for span in part.spans
        ],
        "held": [[one.rank, one.time_ns, one.num_bytes] for one in part.held],
        "exits_ns": part.exits_ns,
    }  # fmt: skip
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def unpack(text: str) -> ProcessTrace:
    """Parse the output of `pack`."""
    value = json.loads(zlib.decompress(base64.b85decode(text)))
    return ProcessTrace(
        ranks=tuple(value["ranks"]),
        host=value["host"],
        process=value["process"],
        spans=tuple(Span(SpanKind(kind), *rest) for kind, *rest in value["spans"]),
        held=tuple(MemorySample(*entry) for entry in value["held"]),
        exits_ns=tuple(value["exits_ns"]),
    )


#: Name of the file of the trace in a run folder.
TRACE = "trace.json"

#: File with the trace of one process, if a run ended before the traces were gathered.
PART = "logs/trace_rank_{rank}.json"


class StepTracer:
    """Traces chosen steps of a session, and writes the trace after the last of them.

    Afterwards, `lines` has the time breakdown and the path of the trace; it is empty in processes
    that do not write the trace.

    Args:
        planned: The plan of the session, with its graph and strategy.
        backend: The backend of the session.
        steps: The steps to trace, counted from 1; empty for none.
        folder: The run folder.
        operators_of: Name of the boxing backend if operators are traced, too; their times are then
            written to the folder.
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
        """Write the trace of a run that ends before all steps were traced."""
        if self._trace is not None:
            # Errors of writing must not hide the error that ended the run.
            with suppress(OSError):
                self._write([own_part(self._trace, self._ranks)])

    @contextmanager
    def step(self, number: int, session: Session) -> Iterator[None]:
        """Trace the step that is run in the block, if it was chosen."""
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
        """Write the trace after the last chosen step; all processes call this after each step.

        Raises:
            BoxingError: another rank did not send its trace.
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

    def _write(self, parts: Sequence[ProcessTrace]) -> None:
        """Write the trace of these processes, and set `lines`."""
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
            found = OperatorTimes(
                backend=self.operators_of,
                num_ranks=len(self.plan.ranks),
                machine=describe_machine(torch.__version__),
                operators=measured_operators(self.planned.graph, self.planned.strategy, spans),
            )
            OPERATOR_TIMES.write(found, self.folder / OPERATORS)
            self.lines.append(
                f"times of {len(found.operators)} calls of operators: {OPERATORS}; plan with them: "
                f"sbp-calibrate ops={self.folder} out=CLUSTER_FILE"
            )
