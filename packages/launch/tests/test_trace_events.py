from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from traces import FIRING_NS, spans_of
from trainable import plan_step, run_config, run_of

from sbp_core.compile import BoxingActor
from sbp_core.runtime import MemorySample, Span, SpanKind
from sbp_launch.planning.flow import Planned
from sbp_launch.tracing.events import Traced, trace_json
from sbp_launch.trainer.run_program import make_program


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
        end_us = round(event["ts"] + event["dur"], 3)  # whole nanoseconds
        lanes[event["pid"], event["tid"]].append((event["ts"], end_us))
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
        plan.by_rank[rank].by_name[name].num_firings(plan.repetitions)
        for rank, name in (link.sender for link in plan.links)
    )
    assert all(starts[number]["pid"] != ends[number]["pid"] for number in starts)


def test_ranks_and_threads_are_named_and_memory_is_counted() -> None:
    held = [MemorySample(1, 5_000, 4096)]
    _, value = trace_of("data", held=held, hosts={0: "one, process 7"})

    names = {(e["name"], e["pid"]): e["args"] for e in events_of(value, "M")}
    assert names["process_name", 1] == {"name": "rank 1"}
    lanes = {
        (e["pid"], e["tid"]): e["args"] for e in events_of(value, "M") if e["name"] == "thread_name"
    }
    assert lanes[0, 1] == {"name": "compute"} and lanes[0, 41] == {"name": "compute, predicted"}
    assert lanes[1, 101] == {"name": "compute"} and lanes[1, 141] == {"name": "compute, predicted"}
    assert names["process_labels", 0] == {"labels": "one, process 7"}
    (counter,) = events_of(value, "C")
    assert (counter["pid"], counter["ts"], counter["args"]) == (1, 5.0, {"bytes": 4096})
    assert value["otherData"]["steps"] == [1]


@pytest.mark.parametrize("axis", ["data", "pipe"])
def test_below_a_measured_step_lies_the_simulated_one_under_the_same_names(axis: str) -> None:
    _, value = trace_of(axis)

    begin_us = min(event["ts"] for event in events_of(value, "X"))
    measured = {
        (event["pid"], event["name"], event["args"]["actor"], event["args"]["micro_batch"])
        for event in events_of(value, "X")
        if event["cat"] in ("compute", "boxing")
    }
    predicted = [
        event
        for event in events_of(value, "X")
        if event["cat"] in ("predicted compute", "predicted boxing")
    ]
    assert measured == {
        (event["pid"], event["name"], event["args"]["actor"], event["args"]["micro_batch"])
        for event in predicted
    }
    assert min(event["ts"] for event in predicted) == begin_us
    end_us = max(event["ts"] + event["dur"] for event in predicted)
    assert end_us - begin_us == pytest.approx(planned_over(axis).simulation.step_s * 1e6, abs=0.01)


def test_a_step_that_begins_before_the_last_one_is_predicted_to_end_has_no_prediction() -> None:
    made = planned_over("data")
    spans = list(spans_of(made.plan, late_ns=0))
    step_ns = round(made.simulation.step_s * 1e9)
    later = [
        replace(one, step=step, begin_ns=one.begin_ns + after_ns, end_ns=one.end_ns + after_ns)
        for step, after_ns in ((1, step_ns // 2), (2, 2 * step_ns))
        for one in spans
    ]

    value = trace_json(Traced(plan=made.plan, graph=made.graph, spans=[*spans, *later]))

    names = [event["name"] for event in events_of(value, "X") if event["cat"] == "predicted step"]
    assert set(names) == {"step 1", "step 3"}


def test_of_a_plan_that_has_not_run_there_is_the_prediction_alone() -> None:
    made = planned_over("data")

    value = trace_json(Traced(plan=made.plan, graph=made.graph, spans=()))

    assert {event["cat"].split()[0] for event in events_of(value, "X")} == {"predicted"}
    lanes = [e["args"]["name"] for e in events_of(value, "M") if e["name"] == "thread_name"]
    assert lanes == ["compute, predicted"] * 2


def test_what_goes_over_a_link_is_predicted_behind_what_went_before() -> None:
    made = planned_over("data")
    late_s = 2 * made.simulation.step_s
    ends_s = [free_s + late_s for free_s in made.simulation.frees_s]
    simulation = replace(made.simulation, ends_s=ends_s)

    value = trace_json(Traced(plan=made.plan, graph=made.graph, spans=(), simulation=simulation))

    lanes = {e["args"]["name"] for e in events_of(value, "M") if e["name"] == "thread_name"}
    assert lanes == {"compute, predicted", "compute, predicted links"}
    for tid in (71, 171):
        links = [e for e in events_of(value, "X") if e["tid"] == tid]
        assert len(links) == len(made.simulation.firings) // 2
        for before, after in pairwise(links):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=0.002)
