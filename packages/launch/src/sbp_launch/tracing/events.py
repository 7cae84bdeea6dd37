"""Convert a trace into events for the viewers Perfetto and `chrome://tracing`.

A process of the viewer is a rank, and a lane in it is a thread; below them is a curve of the rank's
memory. A slice is a firing (one execution of an actor: a segment of operators or a boxing step),
named after its modules or the tensor that it moves. Slices between firings and inside of them are
waits; inside are also operators, if they were traced. Arrows lead from sends to receives.

Below the threads is the simulated step of the plan, aligned with the first firing of the traced
step, with the same names. A lane of links has the boxing that continues while its thread is free.

    rank 0
      compute            |step 10 ...
                         |forward blocks.0|all-reduce         |forward blocks.1 ...
                                          |wait for rank 1|
      compute, predicted |step 10 ...
                         |forward blocks.0 |all-reduce |forward blocks.1 ...
      held bytes ▁▂▃▃▅
    rank 1
      compute            |step 10 ...
                         |forward blocks.0                |all|forward blocks.1 ...

For a plan that has not run, there is the prediction alone.

Source: "Trace Event Format", the JSON form of `chrome://tracing`, which Perfetto reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sbp_core.compile import Actor, ActorId, BoxingActor, Compute, PhysicalPlan, Receive, Send
from sbp_core.graph import LogicalGraph, Node, Phase
from sbp_core.runtime import MemorySample, Span, SpanKind
from sbp_core.simulation import Simulation, simulate
from sbp_launch.planning.moves import updated_module
from sbp_launch.tracing.times import END_OF, LastArrival, last_arrivals

Event = dict[str, Any]

#: Offsets of the lanes of a thread's prediction and of its links, from the lane of the thread.
_PREDICTED, _LINKS = 40, 70

#: Names of phases.
_PHASES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.WEIGHT_GRADIENT: "weight gradient",
    Phase.OPTIMIZER: "update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The recorded trace of a run, and its context.

    Args:
        plan: The plan that ran.
        graph: The graph of the plan; it has the module of each operator.
        spans, held: Time spans and memory samples of all ranks.
        hosts: Host and process of each rank.
        clock_error_s: Remaining difference between the clocks of hosts, in seconds.
        simulation: The simulation of the plan; computed if None.
    """

    plan: PhysicalPlan
    graph: LogicalGraph
    spans: Sequence[Span]
    held: Sequence[MemorySample] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)
    clock_error_s: float = 0.0
    simulation: Simulation | None = None


def trace_json(traced: Traced) -> dict[str, Any]:
    """Return the trace as a JSON value for viewers."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": traced.plan.hash,
            "steps": sorted({span.step + 1 for span in traced.spans}),
            "hosts": {str(rank): host for rank, host in sorted(traced.hosts.items())},
            "clock_error_s": traced.clock_error_s,
        },
        "traceEvents": list(_Events(traced)),
    }


class _Events:
    """Iterates over the events of a trace."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.plan = traced, traced.plan
        self.nodes = {node.name: node for node in traced.graph.nodes}
        self.late = last_arrivals(traced.plan, traced.spans)
        self.start_ns = min((span.begin_ns for span in traced.spans), default=0)
        # Viewers treat a lane with the number of its process as the main thread.
        self.lanes = {
            (part.rank, thread): 100 * part.rank + lane + 1
            for part in traced.plan.ranks
            for lane, thread in enumerate(part.orders)
        }
        self.texts: dict[tuple[int, str], tuple[str, Event]] = {}
        self.simulation = traced.simulation or simulate(traced.plan)
        #: Start of each step on the first rank that began it.
        self.begins_ns: dict[int, int] = {}
        for span in traced.spans:
            begin_ns = self.begins_ns.get(span.step, span.begin_ns)
            self.begins_ns[span.step] = min(begin_ns, span.begin_ns)

    def __iter__(self) -> Iterator[Event]:
        # The names of processes and lanes, in the order of ranks.
        for rank in sorted({rank for rank, _ in self.lanes}):
            yield _meta("process_name", rank, 0, name=f"rank {rank}")
            yield _meta("process_sort_index", rank, 0, sort_index=rank)
            if host := self.traced.hosts.get(rank, ""):
                yield _meta("process_labels", rank, 0, labels=host)
        ranks = {span.rank for span in self.traced.spans}
        for (rank, thread), lane in self.lanes.items():
            if rank in ranks:
                yield _meta("thread_name", rank, lane, name=thread)
                yield _meta("thread_sort_index", rank, lane, sort_index=lane)
        # A slice for each step on each lane, around its firings.
        steps: dict[tuple[int, str, int], Span] = {}
        for span in self.traced.spans:
            known = steps.setdefault((span.rank, span.thread, span.step), span)
            begin_ns, end_ns = min(known.begin_ns, span.begin_ns), max(known.end_ns, span.end_ns)
            around = replace(known, begin_ns=begin_ns, end_ns=end_ns)
            steps[span.rank, span.thread, span.step] = around
        for span in steps.values():
            yield self._slice(span, f"step {span.step + 1}", "step", span.end_ns, {})
        for span in self.traced.spans:
            yield from self._slices(span)
        yield from self._arrows()
        yield from self._predicted()
        for held in self.traced.held:
            yield {
                "ph": "C", "name": "held", "pid": held.rank, "ts": self._us(held.time_ns),
                "args": {"bytes": held.num_bytes},
            }  # fmt: skip

    def _us(self, time_ns: int) -> float:
        return (time_ns - self.start_ns) / 1000

    def _slices(self, span: Span) -> Iterator[Event]:
        """Yield the slice of a span, and the wait for other ranks inside of it."""
        label = {"step": span.step + 1, "micro_batch": span.micro_batch}
        if span.kind is SpanKind.OPERATOR:
            node = self.nodes.get(span.node)
            name = node.op.removesuffix(".default") if node else span.node
            args = {**label, "node": span.node, "module": _module_of(node) if node else ""}
            yield self._slice(span, name, "operator", span.end_ns, args)
            return
        if span.kind is not SpanKind.FIRING:
            is_end = span.waits_for.startswith(END_OF)
            name = "wait for boxing" if is_end else "wait for data or credits"
            if span.kind is SpanKind.TURN:
                name = "wait for its turn"
            args = {**label, "actor": span.actor, "waits_for": span.waits_for}
            yield self._slice(span, name, "wait", span.end_ns, args)
            yield from self._late_slice(span)
            return
        name, args = self._text(span.rank, self.plan.by_rank[span.rank].by_name[span.actor])
        category = "boxing" if "bytes" in args else "compute"
        yield self._slice(span, name, category, span.end_ns, label | args)
        yield from self._late_slice(span)

    def _late_slice(self, span: Span) -> Iterator[Event]:
        """Yield the slice of a boxing call's wait for another rank, if there was one."""
        late: LastArrival | None = self.late.get(span)
        if late is not None:
            name = f"wait for rank {late.rank}"
            yield self._slice(span, name, "wait", late.until_ns, {"came_last": late.rank})

    def _slice(
        self, span: Span, name: str, category: str, end_ns: int, args: Event, lane: int = 0
    ) -> Event:
        """Return a slice; `lane` is an offset from the lane of the thread."""
        return {
            "ph": "X", "name": name, "cat": f"predicted {category}" if lane else category,
            "pid": span.rank, "tid": self.lanes[span.rank, span.thread] + lane,
            "ts": self._us(span.begin_ns), "dur": (end_ns - span.begin_ns) / 1000, "args": args,
        }  # fmt: skip

    def _text(self, rank: int, actor: Actor) -> tuple[str, Event]:
        """Return the name and the arguments of an actor's slices."""
        key = rank, actor.name
        if key not in self.texts:
            self.texts[key] = self._describe(rank, actor)
        return self.texts[key]

    def _describe(self, rank: int, actor: Actor) -> tuple[str, Event]:
        args: Event = {"actor": actor.name, "phase": _PHASES[actor.phase]}
        args["predicted_us"] = round(actor.time_s * 1e6, 1)
        if isinstance(actor, BoxingActor):
            step = self.plan.steps[actor.step]
            kind = {Send: "send", Receive: "receive"}.get(type(actor), str(step.kind))
            args |= {"bytes": step.size_bytes, "boxing": str(step)}
            args["ranks"] = list(step.group(rank))
            # The tensor that it moves: `blocks.0.proj.addmm`, without the layout in its key.
            name = actor.message if isinstance(actor, Send | Receive) else actor.name
            value = name.partition("@")[0]
            return f"{kind} {value}", args
        if not isinstance(actor, Compute):
            return f"accumulate {_PHASES[actor.phase]}", args
        found = [self.nodes[one.node] for one in actor.instructions if one.node in self.nodes]
        modules = list(dict.fromkeys(_module_of(node) for node in found))
        args |= {"modules": modules, "operators": len(actor.instructions)}
        ends = dict.fromkeys(modules[:1] + modules[-1:])
        return f"{_PHASES[actor.phase]} {' to '.join(ends)}".rstrip(), args

    def _predicted(self) -> Iterator[Event]:
        """Yield lanes and slices of the simulated step, aligned with the traced steps."""
        linked: set[tuple[int, str]] = set()
        over_ns = 0
        for step, begin_ns in sorted(self.begins_ns.items()) or [(0, 0)]:
            # If the prediction is longer than the step, it would overlap the next one: skip that.
            if begin_ns >= over_ns:
                over_ns = begin_ns + round(self.simulation.step_s * 1e9)
                for rank, thread in self.lanes:
                    span = Span(SpanKind.FIRING, rank, thread, step, "", 0, begin_ns, over_ns)
                    yield self._slice(span, f"step {step + 1}", "step", over_ns, {}, _PREDICTED)
                for span, lane in self._simulated(step, begin_ns):
                    if lane == _LINKS:
                        linked.add((span.rank, span.thread))
                    actor = self.plan.by_rank[span.rank].by_name[span.actor]
                    name, args = self._text(span.rank, actor)
                    category = "boxing" if "bytes" in args else "compute"
                    args = {"step": step + 1, "micro_batch": span.micro_batch, **args}
                    yield self._slice(span, name, category, span.end_ns, args, lane)
        for what, threads in ((_PREDICTED, sorted(self.lanes)), (_LINKS, sorted(linked))):
            for rank, thread in threads:
                lane = self.lanes[rank, thread] + what
                name = f"{thread}, predicted" + " links" * (what == _LINKS)
                yield _meta("thread_name", rank, lane, name=name)
                yield _meta("thread_sort_index", rank, lane, sort_index=lane)

    def _simulated(self, step: int, begin_ns: int) -> Iterator[tuple[Span, int]]:
        """Yield simulated firings as spans, each with the offset of its lane."""
        landed_s: dict[tuple[int, str], float] = {}
        for one in self.simulation.firings:
            thread = one.rank, one.actor.thread
            times_s = {_PREDICTED: (one.start_s, one.free_s)}
            if one.end_s > one.free_s:
                # A transfer over a link waits there for the transfer before it.
                times_s[_LINKS] = max(one.free_s, landed_s.get(thread, 0.0)), one.end_s
                landed_s[thread] = one.end_s
            for lane, found_s in times_s.items():
                begin, end = (begin_ns + round(time_s * 1e9) for time_s in found_s)
                firing = *thread, step, one.actor.name, one.index, begin, end
                yield Span(SpanKind.FIRING, *firing), lane

    def _arrows(self) -> Iterator[Event]:
        """Yield an arrow for each transfer: from the begin of its send to the end of receiving."""
        firings: dict[ActorId, dict[tuple[int, int], Span]] = defaultdict(dict)
        for span in self.traced.spans:
            if span.kind is SpanKind.FIRING:
                firings[span.rank, span.actor][span.step, span.micro_batch] = span
        number = 0
        for link in self.plan.links:
            for which, sent in firings[link.sender].items():
                received = firings[link.receiver].get(which)
                if received is None:
                    continue
                number += 1
                for phase, span, time_ns in (
                    ("s", sent, sent.begin_ns),
                    ("f", received, received.end_ns),
                ):
                    yield {
                        "ph": phase, "bp": "e", "id": number, "name": "transfer", "cat": "transfer",
                        "pid": span.rank, "tid": self.lanes[span.rank, span.thread],
                        "ts": self._us(time_ns),
                    }  # fmt: skip


def _meta(name: str, rank: int, lane: int, /, **args: object) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": lane, "args": args}


def _module_of(node: Node) -> str:
    module = updated_module(node) if node.phase is Phase.OPTIMIZER else node.module
    return module or "(root)"
