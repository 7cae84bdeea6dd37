"""Evaluation on the session that trains: of averaged parameters, and of every metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import trainable
from torch import Tensor, nn
from trainable import held_out_loss, plan_step, registry, run_config, run_of, step_of

from sbp_launch.optimizers import optimizer_over
from sbp_launch.planning.flow import Planned
from sbp_launch.run.run import Run
from sbp_launch.settings.config import EvaluateConfig, PluginChoice, RunConfig
from sbp_launch.step.forward import Mode, plan_forward
from sbp_launch.trainer import trainer
from sbp_launch.trainer.evaluation import Evaluator
from sbp_launch.trainer.run_program import RunProgram, make_program
from sbp_torch.update_options import UpdateOptions

DECAY = 0.75


def averaging(planner: str = "even", **trainer_settings: object) -> RunConfig:
    """Return a small run whose parameters are averaged."""
    config = run_config(
        dtype="float64",
        update=UpdateOptions(fused=True, ema_decay=DECAY),
        evaluate=EvaluateConfig(batches=2),
        **trainer_settings,
    )
    return replace(config, planner=PluginChoice(name=planner))


@pytest.mark.parametrize("planner", ["even", "sharding"])
def test_averaged_parameters_are_evaluated_where_there_are_some(planner: str) -> None:
    run = run_of(averaging(planner))
    program = make_program(run)
    model = program.made.whole_model()
    optimizer = optimizer_over(program.make_optimizer, model)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for index in range(3):
        optimizer.zero_grad()
        model.loss(program.batch(program.cursor().advanced(4 * index), 4)).backward()
        optimizer.step()
        for name, p in model.named_parameters():  # the first average is the parameter
            old = p.detach() if index == 0 else DECAY * averages[name] + (1 - DECAY) * p.detach()
            averages[name] = old.clone()

    with step_of(run, program) as step:
        for index in range(3):
            step(program.batch(program.cursor().advanced(4 * index), 4))
        found = held_out_loss(run, program, step)

    begin = program.cursor("validation")
    batches = [program.batch(begin.advanced(4 * index), 4, "validation") for index in range(2)]
    trained = sum(model.loss(batch).item() for batch in batches) / 2
    model.load_state_dict(averages)
    expected = sum(model.loss(batch).item() for batch in batches) / 2
    assert found == pytest.approx(expected, abs=1e-12)
    assert found != pytest.approx(trained, abs=1e-6)


def plan_evaluation(run: Run, program: RunProgram, train: Planned) -> Planned:
    """Plan the evaluation of a run, of averages where there are some."""
    example = program.example(run.config.trainer.micro_batch_size)
    return plan_forward(program.one_device, example, train.settings, train, Mode.AVERAGED)


def test_averages_are_read_in_place_of_the_parameters() -> None:
    run = run_of(averaging())
    program = make_program(run)

    found = plan_evaluation(run, program, plan_step(run, program)).graph

    states = {entry.name for entry in found.inputs if entry.kind.is_state}
    assert states == {"embed.weight.ema", "head.weight.ema", "head.bias.ema"}


@pytest.mark.slow
def test_what_was_evaluated_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.train(averaging(compare_steps=0), registry(), tmp_path)

    assert "held-out loss of the averaged parameters: " in capsys.readouterr().out


@pytest.mark.slow
def test_every_evaluation_sees_the_newest_states_and_the_same_batches() -> None:
    run = run_of(run_config(dtype="float64"))
    program = make_program(run)

    found = []
    with step_of(run, program) as step:
        evaluator = Evaluator(run, program, step)
        for index in range(2):
            step(program.batch(program.cursor().advanced(4 * index), 4))
            alone = held_out_loss(run, program, step)
            found.append((evaluator.metrics(), evaluator.metrics()))
            assert found[-1][0]["held_out_loss"] == alone

    assert found[0][0] == found[0][1]
    assert found[0][0] != found[1][0]


class Dropping(trainable.Wide):
    """Drops between its blocks, in modules of their own, which evaluation has no part of."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.ModuleList([nn.Dropout(0.5) for _ in self.blocks])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.first(batch["x"])
        for block, drop in zip(self.blocks, self.drop, strict=True):
            x = x + drop(block(x))
        return (self.head(x) - batch["wanted"]).square().mean()


@pytest.mark.slow
def test_stages_with_dropout_are_evaluated_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainable, "make_wide", lambda config: Dropping())
    config = run_config((2,), ("pipe",), micro_batches=2)
    run = run_of(replace(config, model=PluginChoice(name="wide"), data=PluginChoice(name="rows")))
    program = make_program(run)
    train = plan_step(run, program)

    found = plan_evaluation(run, program, train)

    assert "drop.0" in {node.module for node in train.graph.nodes}
    assert "drop.0" not in {node.module for node in found.graph.nodes}
    assert len(found.plan.stages) == 2
    where = {name: entry.stage for name, entry in train.strategy.storage.items()}
    assert {where[name] == entry.stage for name, entry in found.strategy.storage.items()} == {True}
