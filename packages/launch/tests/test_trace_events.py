from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from traces import FIRING_NS, spans_of
from trainable import run_config, run_of

from sbp_core.compile import BoxingActor
from sbp_core.runtime import Held, Span, SpanKind
from sbp_launch.tracing.events import Traced, trace_json
from sbp_launch.trainer.planned import Planned, plan_step
from sbp_launch.trainer.program import make_program


@cache
def planned_over(axis: str) -> Planned:
    run = run_of(run_config(axes=(axis,), micro_batches=2))
    return plan_step(run, make_program(run))


def trace_of(axis: str, **more: Any) -> tuple[list[Span], dict[str, Any]]:
    """Return made-up spans in which rank 1 is late, and their trace."""
    made = planned_over(axis)
    spans = list(spans_of(made.plan, late_ns=FIRING_NS // 2))
    traced = Traced(plan=made.plan, graph=made.graph, spans=spans, **more)
    return spans, json.loads(json.dumps(trace_json(traced)))


def events_of(value: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in value["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("axis", ["data", "pipe"])
def test_slices_of_a_lane_lie_in_each_other_or_apart(axis: str) -> None:
    spans, value = trace_of(axis)

    lanes = defaultdict(list)
    for event in events_of(value, "X"):
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, lanes.values())) >= len(spans)
    for slices in lanes.values():
        open_ends: list[float] = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


@pytest.mark.parametrize("axis", ["data", "pipe"])
def test_every_firing_is_a_slice_with_its_actor_and_micro_batch(axis: str) -> None:
    spans, value = trace_of(axis)

    found = [
        (event["pid"], event["args"]["actor"], event["args"]["micro_batch"])
        for event in events_of(value, "X")
        if event["cat"] in ("compute", "boxing")
    ]
    assert found == [(span.rank, span.actor, span.micro_batch) for span in spans]


def test_the_slices_of_a_step_lie_in_a_slice_of_that_step() -> None:
    spans, value = trace_of("data")

    steps = [event for event in events_of(value, "X") if event["cat"] == "step"]
    assert [(event["pid"], event["name"]) for event in steps] == [(0, "step 1"), (1, "step 1")]
    for event in steps:
        own = [span for span in spans if span.rank == event["pid"]]
        took_ns = max(span.end_ns for span in own) - min(span.begin_ns for span in own)
        assert event["dur"] == pytest.approx(took_ns / 1000)


def test_slices_name_modules_or_what_is_moved_and_its_bytes() -> None:
    plan, (_, value) = planned_over("data").plan, trace_of("data")

    slices = events_of(value, "X")
    computing = [event for event in slices if event["cat"] == "compute"]
    modules = {module for event in computing for module in event["args"].get("modules", ())}
    assert {"embed", "head"} <= modules
    assert any(event["name"].startswith("forward embed") for event in computing)
    assert any(event["name"].startswith("update ") for event in computing)
    for event in slices:
        if event["cat"] == "boxing":
            actor = plan.by_rank[event["pid"]].by_name[event["args"]["actor"]]
            assert isinstance(actor, BoxingActor)
            assert event["args"]["bytes"] == plan.steps[actor.step].size_bytes
            assert event["args"]["ranks"] == [0, 1]
            assert event["name"].startswith(f"{plan.steps[actor.step].kind} ")


def test_a_wait_for_another_rank_lies_in_the_boxing_call() -> None:
    _, value = trace_of("data")

    waits = [event for event in events_of(value, "X") if event["cat"] == "wait"]
    assert waits
    assert {(event["pid"], event["name"]) for event in waits} == {(0, "wait for rank 1")}
    assert {event["dur"] for event in waits} == {FIRING_NS / 2 / 1000}


def test_waits_before_and_in_firings_say_what_for() -> None:
    made = planned_over("data")
    first, *_ = spans_of(made.plan)
    waits = [
        replace(first, kind=SpanKind.BLOCKED, end_ns=first.begin_ns, waits_for="data of rank 1"),
        replace(first, kind=SpanKind.TURN, waits_for="the interpreter"),
    ]

    value = trace_json(Traced(plan=made.plan, graph=made.graph, spans=[*waits, first]))

    slices = events_of(value, "X")
    found = [(e["name"], e["args"]["waits_for"]) for e in slices if e["cat"] == "wait"]
    assert found == [
        ("wait for data or credits", "data of rank 1"),
        ("wait for its turn", "the interpreter"),
    ]


def test_arrows_lead_from_each_send_to_its_receive() -> None:
    _, value = trace_of("pipe")

    starts = {event["id"]: event for event in events_of(value, "s")}
    ends = {event["id"]: event for event in events_of(value, "f")}
    plan = planned_over("pipe").plan
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(
        plan.by_rank[rank].by_name[name].num_firings(plan.num_micro_batches)
        for rank, name in (link.sender for link in plan.links)
    )
    assert all(starts[number]["pid"] != ends[number]["pid"] for number in starts)


def test_ranks_and_threads_are_named_and_memory_is_counted() -> None:
    held = [Held(1, 5_000, 4096)]
    _, value = trace_of("data", held=held, hosts={0: "one, process 7"})

    names = {(e["name"], e["pid"]): e["args"] for e in events_of(value, "M")}
    assert names["process_name", 1] == {"name": "rank 1"}
    assert names["thread_name", 0] == {"name": "compute"}
    assert names["process_labels", 0] == {"labels": "one, process 7"}
    (counter,) = events_of(value, "C")
    assert (counter["pid"], counter["ts"], counter["args"]) == (1, 5.0, {"bytes": 4096})
    assert value["otherData"]["steps"] == [1]
