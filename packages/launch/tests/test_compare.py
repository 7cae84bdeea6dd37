"""Two plans of one model side by side, also on other meshes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from test_rows import found_plan
from trainable import row, run_config, run_of

from sbp_core import strategy_yaml
from sbp_core.errors import ConfigError
from sbp_launch.apps.plan import PlanConfig
from sbp_launch.console import change_text, columns
from sbp_launch.explaining.compare import changes, compare_lines
from sbp_launch.explaining.question import read_strategy, strategy_of
from sbp_launch.run.run import Run
from sbp_launch.step.step_planner import StepPlanner
from sbp_launch.trainer.other_plan import planned_as
from sbp_launch.trainer.planned import planner_of
from sbp_launch.trainer.run_program import RunProgram, make_program


@cache
def planner() -> tuple[StepPlanner, Run, RunProgram]:
    run = run_of(run_config())
    program = make_program(run)
    return planner_of(run, program), run, program


def test_a_plan_beside_itself_differs_in_nothing() -> None:
    planned = found_plan("replicated")

    lines = list(compare_lines(planned, planned, "the same"))

    assert lines[-1].startswith("all ") and lines[-1].endswith(" modules are split in the same way")
    assert all(line.endswith("=") for line in lines[3:-1])


@pytest.mark.slow
def test_figures_and_modules_that_differ_are_listed_layers_together() -> None:
    lines = list(compare_lines(found_plan("sharded"), found_plan("columns and rows"), "other"))

    text = "\n".join(lines)
    assert "memory of the fullest rank" in text and "number of all-gathers" in text
    assert "blocks.*.0 x3" in text and "(this plan -> other):" in text
    assert "blocks.0" not in text


def test_modules_with_equal_sbps_are_left_out() -> None:
    before = [row("up"), row("down"), row("head", parameters=(("weight", "(B)"), ("bias", "(B)")))]
    after = [
        row("up", output="(B)"),
        row("down", moved=10),
        row("head", parameters=(("weight", "(S(0))"), ("bias", "(S(0))")), stage=1),
    ]

    found, num_modules = changes(before, after)

    assert num_modules == 3
    assert [(one.module, one.parameters, one.output) for one in found] == [
        ("up", (), "(S(0)) -> (B)"),
        ("head", (("stage", "stage 0 -> stage 1"), ("weight, bias", "(B) -> (S(0))")), ""),
    ]


@pytest.mark.parametrize("name", ["replicated", "micro-batches"])
def test_a_strategy_that_was_written_is_the_same_plan(name: str, tmp_path: Path) -> None:
    planned, path = found_plan(name), tmp_path / "strategy.yaml"
    strategy_yaml.save(planned.strategy, path)

    other = planned_as(read_strategy(strategy_of(str(tmp_path))), *planner())

    assert other.plan.hash == planned.plan.hash
    assert strategy_of(str(path)) == path


@pytest.mark.slow
def test_a_plan_of_another_mesh_is_made_for_as_many_ranks() -> None:
    run = run_of(run_config(mesh=(2, 2), axes=("pipe", "data"), micro_batches=2))
    program = make_program(run)
    theirs = planner_of(run, program).plan()

    other = planned_as(theirs.strategy, *planner())

    assert len(other.plan.ranks) == 4
    assert other.simulation.step_s == theirs.simulation.step_s
    assert any("stages of" in line for line in compare_lines(found_plan("replicated"), other, "a"))


def test_a_strategy_of_other_sizes_is_priced_for_the_step_of_now_and_that_is_said() -> None:
    planned = found_plan("replicated")
    elsewhere = replace(planned.strategy, graph_hash="of other sizes")

    same, other = (planned_as(one, *planner()) for one in (planned.strategy, elsewhere))

    lines = [list(compare_lines(planned, one, "other")) for one in (same, other)]
    told = "other was made for other sizes or settings; both are priced for this step"
    assert told not in lines[0] and told in lines[1]


def test_the_plan_of_another_model_is_refused_with_what_it_names() -> None:
    with pytest.raises(ConfigError, match="for another model") as caught:
        planned_as(found_plan("sharded").strategy, *planner())

    assert any(place.startswith("it decides on ") for place in caught.value.where)
    assert any("does not decide on" in place and "embed" in place for place in caught.value.where)


@pytest.mark.parametrize("name", ["missing.yaml", "folder", "notes.txt"])
def test_what_holds_no_strategy_is_refused_before_anything_is_planned(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        PlanConfig(compare=str(tmp_path / name))

    assert "run" in caught.value.accepted


def test_columns_are_aligned_and_changes_have_their_sign() -> None:
    assert columns([["", "a", "b"], ["long", "1", "2 ms"]]) == ["      a  b", "long  1  2 ms"]
    pairs = [(1, 1), (0, 1), (1.0, 1.123), (1, 0.968), (1, 1.0001), (1, 3)]
    assert [change_text(*pair) for pair in pairs] == ["=", "new", "+12%", "-3.2%", "=", "+200%"]
