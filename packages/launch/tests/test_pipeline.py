"""What is said of a pipeline: stages, schedule, and the share of the step that ranks wait."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from test_rows import found_plan, wide

from sbp_core.simulate import simulate
from sbp_launch.planning.pipeline import pipeline_lines


def lines_of(found):
    return pipeline_lines(found.plan, found.strategy, found.module_rows)


def test_a_plan_of_one_stage_has_no_schedule():
    assert lines_of(found_plan("replicated")) == []


def test_each_stage_says_its_ranks_modules_and_activations():
    first, *stages, bubble = lines_of(found_plan("pipeline"))

    assert first == "pipeline: 2 stages, 4 micro-batches, schedule 1F1B"
    assert stages[0].startswith("  stage 0 (rank 0): first, blocks.")
    assert stages[0].endswith(", 2 in flight")
    assert "head; busy " in stages[1]
    assert stages[1].endswith(", 1 in flight")
    assert "(p - 1)/(m + p - 1) = 20% if stages were equal" in bubble


def test_the_ranks_of_stages_are_named():
    lines = lines_of(found_plan("pipeline of meshes"))

    assert lines[1].startswith("  stage 0 (ranks 0-1): ")


def test_ranks_wait_whenever_they_do_not_compute():
    found = found_plan("pipeline")

    *_, bubble = lines_of(found)

    busy = sum(
        actor.time_s * actor.num_firings(4)
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
        found.plan, replace(found.strategy, in_flight=in_flight), found.module_rows
    )

    assert lines[0].endswith(f"schedule {name}")


def test_a_pipeline_of_one_micro_batch_says_how_to_use_all_stages():
    *_, bubble = lines_of(wide("even", axes=("pipe",)))

    assert "raise trainer.micro_batches" in bubble
