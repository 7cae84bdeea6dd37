"""What is said of a pipeline: stages, schedule, and the share of the step that ranks wait."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from test_rows import found_plan, wide

from sbp_core.graph.ir import repetitions
from sbp_core.memory import predict_memory
from sbp_core.simulation import simulate
from sbp_launch.explaining.pipeline_lines import pipeline_lines
from sbp_launch.explaining.report import memory_lines


def lines_of(found):
    return pipeline_lines(found.plan, found.strategy, found.module_rows, found.simulation.step_s)


def test_a_plan_of_one_stage_has_no_schedule():
    assert lines_of(found_plan("replicated")) == []


@pytest.mark.slow
def test_each_stage_says_its_ranks_modules_and_activations():
    first, *stages, bubble = lines_of(found_plan("pipeline"))

    assert first == "pipeline: 2 stages, 4 micro-batches, schedule 1F1B"
    assert stages[0].startswith("  stage 0 (rank 0): first, blocks.")
    assert stages[0].endswith(", 2 in flight")
    assert "head; busy " in stages[1]
    assert stages[1].endswith(", 1 in flight")
    assert "(p - 1)/(m + p - 1) = 20% if stages were equal" in bubble


def test_stages_of_an_asynchronous_pipeline_say_how_old_their_parameters_are():
    found = found_plan("pipeline")
    strategy = replace(found.strategy, staleness=(1, 0), report={"pipeline": "pipedream"})
    plan = replace(found.plan, num_updates=4)

    first, *stages, _ = pipeline_lines(plan, strategy, found.module_rows, found.simulation.step_s)

    assert first.endswith("schedule PipeDream, an update after each micro-batch")
    assert stages[0].endswith(", 2 in flight, parameters up to 1 update old")
    assert stages[1].endswith(", 1 in flight")


def test_updates_by_several_micro_batches_are_said():
    found = found_plan("pipeline")
    strategy = replace(found.strategy, staleness=(1, 1), report={"pipeline": "2bw"})

    first, *_ = pipeline_lines(
        replace(found.plan, num_updates=2), strategy, found.module_rows, found.simulation.step_s
    )

    assert first.endswith("schedule 2BW, an update after every 2 micro-batches")


@pytest.mark.slow
def test_the_ranks_of_stages_are_named():
    lines = lines_of(found_plan("pipeline of meshes"))

    assert lines[1].startswith("  stage 0 (ranks 0-1): ")


def test_ranks_wait_whenever_they_do_not_compute():
    found = found_plan("pipeline")

    *_, bubble = lines_of(found)

    busy = sum(
        actor.time_s * actor.num_firings(repetitions(4, 1))
        for part in found.plan.ranks
        for actor in part.actors
        if not hasattr(actor, "step")
    )
    idle = 1 - busy / 2 / simulate(found.plan).step_s
    assert int(re.search(r"wait (\d+)%", bubble)[1]) == round(100 * idle)


@pytest.mark.parametrize(
    ("in_flight", "name"), [((2, 1), "1F1B"), ((4, 4), "GPipe"), ((3, 1), "with in_flight [3, 1]")]
)
def test_a_schedule_is_called_by_what_may_be_in_flight(in_flight, name):
    found = found_plan("pipeline")

    lines = pipeline_lines(
        found.plan,
        replace(found.strategy, in_flight=in_flight),
        found.module_rows,
        found.simulation.step_s,
    )

    assert lines[0].endswith(f"schedule {name}")


@pytest.mark.slow
def test_a_pipeline_of_one_micro_batch_says_how_to_use_all_stages():
    *_, bubble = lines_of(wide("even", axes=("pipe",)))

    assert "raise trainer.micro_batches" in bubble


def test_a_schedule_with_orders_is_called_by_its_name_and_compared_with_no_formula():
    found = found_plan("pipeline")
    orders = ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    strategy = replace(found.strategy, orders=orders, report={"pipeline": "zbv"})

    first, *_, bubble = pipeline_lines(
        found.plan, strategy, found.module_rows, found.simulation.step_s
    )

    assert first.endswith("schedule zbv")
    assert "(p - 1)" not in bubble


def test_the_memory_of_ranks_with_several_stages_is_said_once():
    plan = found_plan("pipeline").plan
    chunks = replace(plan, stages=plan.stages * 2)

    lines = memory_lines(chunks, predict_memory(plan))

    heads = [line for line in lines if line.startswith("memory")]
    assert [line.partition(" at")[0] for line in heads] == [
        "memory of a rank of stages 0 and 2",
        "memory of a rank of stages 1 and 3",
    ]
