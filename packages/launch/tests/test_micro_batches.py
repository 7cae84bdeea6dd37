"""The number of micro-batches that a run takes by itself: as few as fit the memory of a rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from trainable import plan_step, registry, run_config, run_of

from sbp_core.errors import ConfigError
from sbp_core.memory import predict_memory
from sbp_launch.settings.config import PluginChoice, RunConfig
from sbp_launch.trainer import trainer
from sbp_launch.trainer.planned import planner_of
from sbp_launch.trainer.run_program import make_program


def auto(memory_bytes: int, **changes: object) -> RunConfig:
    """Return a run of 24 samples a step on ranks with so much memory."""
    config = run_config(batch_size=24, **{"micro_batches": "auto", **changes})
    settings = {**config.cluster.settings, "memory_bytes": memory_bytes}
    return replace(config, cluster=replace(config.cluster, settings=settings))


def peak_bytes(micro_batches: int) -> int:
    """Return the most that a rank holds with so many micro-batches."""
    run = run_of(auto(10**9, micro_batches=micro_batches))
    ranks = predict_memory(plan_step(run, make_program(run)).plan).ranks
    return max(rank.peak for rank in ranks.values())


def chosen(memory_bytes: int) -> int:
    run = run_of(auto(memory_bytes))
    program = make_program(run)
    planned = plan_step(run, program)
    assert planned.plan.num_micro_batches == planned.settings.micro_batches
    return planned.settings.micro_batches


@pytest.mark.slow
def test_there_are_as_few_micro_batches_as_fit() -> None:
    needed = {count: peak_bytes(count) for count in (1, 2, 3)}
    assert needed[1] > needed[2] > needed[3]

    assert chosen(needed[1]) == 1
    assert chosen(needed[1] - 1) == 2
    assert chosen(needed[2] - 1) == 3


def test_a_planner_that_chooses_variants_chooses_them_too() -> None:
    config = auto(10**9)
    run = run_of(replace(config, planner=PluginChoice(name="choosing")))
    program = make_program(run)

    planned = plan_step(run, program)

    assert planned.strategy.variant is not None
    assert planned.plan.num_micro_batches == planned.settings.micro_batches == 24


def test_a_number_that_is_said_is_not_left_to_planners() -> None:
    config = auto(10**9, micro_batches=3)
    run = run_of(replace(config, planner=PluginChoice(name="choosing")))
    program = make_program(run)

    planned = plan_step(run, program)

    assert planned.plan.num_micro_batches == 3


@pytest.mark.slow
def test_a_step_that_fits_in_no_parts_is_refused() -> None:
    run = run_of(auto(1000))
    program = make_program(run)

    with pytest.raises(ConfigError, match="not even 24 micro-batches make the step fit") as caught:
        plan_step(run, program)

    assert "cluster.memory_bytes" in caught.value.where
    assert "shard states" in caught.value.todo and "micro_batches" not in caught.value.todo


def test_what_has_nothing_to_do_with_memory_is_told_at_once() -> None:
    tried = []

    class Refusing:
        def plan(self, request: object) -> object:
            tried.append(request)
            raise ConfigError("no axis is called 'pipe'", where="planner/mine.yaml")

    run = run_of(auto(10**9))
    planner = planner_of(run, make_program(run))
    choice = replace(planner.choice, planner=Refusing())  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="no axis is called 'pipe'"):
        replace(planner, choice=choice).plan()

    assert len(tried) == 1


@pytest.mark.slow
def test_a_run_with_micro_batches_of_its_own_choice_trains_as_if_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory_bytes = peak_bytes(1) - 1
    trainer.train(auto(memory_bytes), registry(), tmp_path / "auto")
    out = capsys.readouterr().out
    trainer.train(auto(memory_bytes, micro_batches=2), registry(), tmp_path / "told")

    assert "micro_batches=auto: 1 micro-batch would not fit: rank " in out
    assert "micro_batches=auto: 2, of 12 samples" in out
    losses = [
        [json.loads(line)["loss"] for line in path.read_text("utf-8").splitlines()]
        for path in (tmp_path / name / "metrics.jsonl" for name in ("auto", "told"))
    ]
    assert losses[0] == losses[1]
