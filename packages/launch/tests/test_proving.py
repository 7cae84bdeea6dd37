"""Both doors prove a planned step before they take it, and run first steps beside one device."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from trainable import QUIET, registry, run_config

from sbp_core.errors import ConfigError, GraphError
from sbp_launch import MicroBatches, parallelize
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning import flow
from sbp_launch.trainer import trainer

pytest.importorskip("sbp_planner", reason="parallelize asks for a planner")


def program() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model, batch):
    return (model(batch["x"]) - batch["t"]).square().mean()


BATCH = {"x": torch.randn(8, 4), "t": torch.randn(8, 3)}


def report_of(step) -> str:
    text = io.StringIO()
    step.report(text, max_rows=0)
    return " ".join(text.getvalue().split())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_report_says_what_was_proved_and_the_next_one_that_it_was_before():
    model, optimizer = program()
    given = (model, loss_of, BATCH, optimizer)

    first = report_of(parallelize(*given, mesh=2, micro_batches=2))
    again = report_of(parallelize(*given, mesh=2, micro_batches=2))
    other = report_of(parallelize(*given, mesh=4, micro_batches=2, planner="manual/zero"))

    assert "loss, metrics and new states are those of the captured step" in first
    assert "proved by an earlier run" in again
    assert "proved by an earlier run" in other


@pytest.mark.slow
def test_a_step_that_computes_something_else_is_refused_unless_nothing_is_to_be_proved(monkeypatch):
    model, optimizer = program()
    plain = flow.prepare

    def wrong(captured, settings):
        graph = plain(captured, settings)
        (node,) = (n for n in graph.nodes if n.kind == "pow")
        changed = replace(node, args=(node.args[0], 3))
        return graph.with_nodes(tuple(changed if n is node else n for n in graph.nodes))

    monkeypatch.setattr(flow, "prepare", wrong)
    given = (model, loss_of, BATCH, optimizer)

    with pytest.raises(GraphError, match=r"another loss 'loss'(.|\n)*test_proving\.py"):
        parallelize(*given)
    assert "proved" not in report_of(parallelize(*given, compile={"prove": False})).replace(
        "proves", ""
    )
    parallelize(*given, compile={"prove": False})


@pytest.mark.slow
@pytest.mark.parametrize("loss_is", ["whole_batch", "mean_of_micro_batches", "each_micro_batch"])
def test_first_steps_are_compared_with_one_device(loss_is):
    model, optimizer = program()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)

    with parallelize(
        model,
        loss_of,
        BATCH,
        optimizer,
        mesh=2,
        micro_batches=MicroBatches(2, loss=loss_is),
        compare_steps=3,
    ) as step:
        assert "deviation" not in report_of(step)
        for _ in range(4):
            step(BATCH)
            schedule.step()
        told = report_of(step)

    assert "over the first 3 steps" in told
    assert float(told.partition("3 steps: ")[2].split()[0]) < 1e-6
    trained = step.model_state_dict()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


def test_steps_are_not_compared_without_values():
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ConfigError, match="the model has no values"):
        parallelize(model, loss_of, BATCH, optimizer, compare_steps=1)


def test_a_budget_of_no_time_is_refused():
    with pytest.raises(ConfigError, match=r"prove_s=0"):
        CompileConfig(prove_s=0)


@pytest.mark.slow
def test_a_run_says_what_was_proved(tmp_path, capsys):
    trainer.train(run_config(steps=1, **QUIET), registry(), tmp_path / "run")

    assert "are those of the captured step" in " ".join(capsys.readouterr().out.split())
