"""Slices and recomputation, chosen in the config alone: memory as predicted, the same losses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from trainable import plan_step, registry, run_config, run_of

from sbp_core.errors import ConfigError
from sbp_core.memory import predict_memory
from sbp_core.passes.recomputation import recompute_report
from sbp_core.plugins import merge_settings
from sbp_launch.compile_config import CompileConfig
from sbp_launch.explaining.savings import saving_lines
from sbp_launch.planning.flow import Planned
from sbp_launch.settings.config import PluginChoice, RunConfig
from sbp_launch.trainer import trainer
from sbp_launch.trainer.planning_only import PlanningOnly
from sbp_launch.trainer.run_program import make_program
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.graph_capture import scalar_values
from sbp_torch.memory.meter import MemoryMeter
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime

#: What `compile.passes` may say, by what it does.
PASSES: Mapping[str, Mapping[str, object]] = {
    "nothing": {},
    "slices": {"slices": {"blocks.*": {"count": 8}}},
    "addends": {"slices": {"blocks.*": {"count": 8, "along": "contraction"}}},
    "modules": {"recompute": {"modules": ["blocks.*"]}},
    "budget": {"recompute": {"memory_bytes": 200_000}},
    "both": {"slices": {"blocks.*": {"count": 8}}, "recompute": {"modules": ["blocks.*"]}},
}

#: Large enough that gathering parameters is cheaper than gathering activations.
BATCH_SIZE = 32

#: Bytes of a matrix of a block, in float64.
MATRIX = 256 * 32 * 8


def make_run(passes: Mapping[str, object], ranks: int = 4) -> RunConfig:
    """Return a run of the wide model with all states split, as its config says it."""
    settings = {"passes": passes, "bucket_bytes": 0}
    run = run_config((ranks,), dtype="float64", batch_size=BATCH_SIZE)
    # The model is so small that starts would cost more than all that it computes and moves.
    no_starts = {**run.cluster.settings, "launch_s": 0.0, "boxing_launch_s": 0.0}
    return replace(
        run,
        cluster=replace(run.cluster, settings=no_starts),
        model=PluginChoice(name="wide"),
        data=PluginChoice(name="rows"),
        planner=PluginChoice(name="sharding"),
        # Without moments, the peak is not where new states lie beside the old ones.
        optimizer=PluginChoice(name="sgd", settings={"momentum": 0.0}),
        compile=merge_settings(CompileConfig, settings, key="compile"),
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """A planned run, and by rank the peaks that were predicted and measured."""

    planned: Planned
    predicted: Mapping[int, int]
    measured: Mapping[int, int]


@cache
def found(name: str, ranks: int = 4) -> Found:
    run = make_run(PASSES[name], ranks)
    program = make_program(run_of(run))
    planned = plan_step(run_of(run), program)
    states = program.made.states(program.optimizer, run.trainer.update)
    scalars = scalar_values(program.model, program.optimizer, run.trainer.update)
    meter = MemoryMeter(planned.plan)
    runtime = ReferenceRuntime(ReferenceConfig())
    with runtime.start(planned.plan, states, LocalBackend()) as session, meter.watching(session):
        for index in range(2):
            meter.restart()
            batch = program.batch(program.cursor().advanced(index * BATCH_SIZE), BATCH_SIZE)
            session.step(batch, {**scalars, "seed": 0, "step": index})
    return Found(
        planned=planned,
        predicted={
            rank: memory.peak for rank, memory in predict_memory(planned.plan).ranks.items()
        },
        measured={part.rank: meter.peak(part.rank) for part in planned.plan.ranks},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_the_peak_is_as_predicted(name: str) -> None:
    run = found(name)

    for rank, peak in run.predicted.items():
        # The reference runtime keeps the loss of one rank only.
        assert 0 <= peak - run.measured[rank] <= 8


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["slices", "addends", "modules", "budget", "both"])
def test_what_the_config_asks_for_lowers_the_peak(name: str) -> None:
    before, after = found("nothing"), found(name)

    assert max(after.measured.values()) < max(before.measured.values())


def test_slices_save_more_than_a_whole_matrix_and_move_the_same_bytes() -> None:
    before, after = found("nothing"), found("slices")

    saved = max(before.measured.values()) - max(after.measured.values())
    assert saved > MATRIX
    assert before.planned.plan.boxing_bytes == after.planned.plan.boxing_bytes


@pytest.mark.parametrize("name", ["modules", "budget"])
def test_recomputation_keeps_to_what_it_reports(name: str) -> None:
    report = recompute_report(found(name).planned.graph)

    assert report.saved_after_bytes + report.largest_recomputed_bytes < report.saved_before_bytes
    if name == "budget":
        assert report.saved_after_bytes + report.largest_recomputed_bytes <= 200_000


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_losses_are_those_of_one_device(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.train(make_run(PASSES[name]), registry(), tmp_path)

    deviation = re.search(r"first 3 steps: (\S+) \((\S+) relative\)", capsys.readouterr().out)
    assert deviation and float(deviation[2]) < 1e-12


@pytest.mark.slow
def test_what_was_given_for_the_memory_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(PASSES["both"])

    planning = PlanningOnly(run, registry())
    planning.plan()
    planning.show()

    out = " ".join(capsys.readouterr().out.split())
    assert "slices: 6 parameters of up to 65.5 kB travel in parts of up to 8192 B" in out
    assert re.search(r"keeps \S+ kB instead of \S+ kB of activations", out)


@pytest.mark.slow
def test_slices_that_save_nothing_are_said_to() -> None:
    whole = replace(make_run(PASSES["slices"]), planner=PluginChoice(name="even"))
    planned = plan_step(run_of(whole), make_program(run_of(whole)))
    uneven = found("slices", 3).planned

    assert "it is whole on every rank" in saving_lines(planned.graph, planned.strategy)[0]
    lines = saving_lines(uneven.graph, uneven.strategy)
    assert any("save nothing: it is gathered whole" in line for line in lines)


def test_a_plan_without_slices_has_nothing_to_say() -> None:
    planned = found("nothing").planned

    assert saving_lines(planned.graph, planned.strategy) == []


@pytest.mark.parametrize(
    ("passes", "what", "accepted"),
    [
        ({"slices": {"bloks": {"count": 2}}}, "'bloks' of slices matches no", "blocks.0.0.weight"),
        ({"slices": {"blocks.*": {"count": 5}}}, "are not 5 equal slices", "count=2, 4, 8, 16, 32"),
        ({"recompute": {"modules": ["bloks"]}}, "'bloks' of the recomputation", "blocks.0"),
        ({"recompute": {"memory_bytes": 100}}, "do not fit in 100 B", "memory_bytes >= "),
    ],
)
def test_what_cannot_be_meant_is_a_wrong_setting_before_anything_starts(
    passes: Mapping[str, object], what: str, accepted: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        trainer.train(make_run(passes), registry(), tmp_path)

    assert accepted in caught.value.accepted
    left = {file.name for file in tmp_path.rglob("*") if not file.name.startswith(".")}
    assert left <= {"environment.json", "checkpoints"}, "nothing but the place of checkpoints"


@pytest.mark.slow
def test_the_least_budget_that_an_error_names_is_enough() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of({"recompute": {"memory_bytes": 100}})
    least = int(caught.value.accepted.split(">= ")[1].split()[0])

    report = recompute_report(plan_of({"recompute": {"memory_bytes": float(least)}}).graph)

    assert report.saved_after_bytes + report.largest_recomputed_bytes <= least


def plan_of(passes: Mapping[str, object]) -> Planned:
    run = make_run(passes)
    return plan_step(run_of(run), make_program(run_of(run)))
