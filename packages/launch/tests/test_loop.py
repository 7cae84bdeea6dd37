"""The loop of training: when it ends, evaluates, calls callbacks, and what it keeps of itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainable import Bigram, FakeClock, registry, run_config

from sbp_core.errors import ConfigError, PluginError, RunError
from sbp_core.plugins import (
    Callback,
    Factory,
    PluginRegistry,
    TrainerControl,
    TrainerState,
    TrainingContext,
)
from sbp_core.plugins.registry import PluginEntry
from sbp_launch.checkpoint.settings import CheckpointConfig
from sbp_launch.run.result import read_result
from sbp_launch.settings.budget import ScheduleConfig
from sbp_launch.settings.config import EvaluateConfig, PluginChoice
from sbp_launch.trainer import phases, trainer
from sbp_launch.trainer.callbacks import together
from sbp_launch.trainer.checkpoints import RunCheckpoints
from sbp_launch.trainer.evaluation import Evaluator

#: What the callback of a test is made of; each test sets its own.
MADE: list[Any] = []


def make(config: object) -> Any:
    return MADE[-1]


def with_callback(callback: Any) -> PluginRegistry:
    """Return the plugins of the tests, and a callback `mine`."""
    MADE.append(callback)
    found = registry()
    entry = PluginEntry(
        kind="callback",
        name="mine",
        distribution="mine",
        version="1",
        api_version=1,
        factory=Factory(build="test_loop:make"),
    )
    return PluginRegistry(entries=(*found.entries, entry), folders=found.folders)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Noting(Callback):
    """Notes what it sees, and asks for what it is told to behind some steps."""

    def __init__(self, asks: Mapping[int, TrainerControl] | None = None) -> None:
        self.asks = asks or {}
        self.seen: list[tuple[str, TrainerState]] = []
        self.context: TrainingContext | None = None

    def on_train_begin(self, context: TrainingContext, state: TrainerState) -> None:
        self.context = context
        self.seen.append(("begin", state))

    def on_step_end(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        assert {"loss", "lr", "step_s", "data_s"} <= metrics.keys()
        self.seen.append(("step", state))
        return self.asks.get(state.step)

    def on_evaluate(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
        assert "held_out_loss" in metrics
        self.seen.append(("evaluate", state))

    def on_train_end(self, state: TrainerState) -> None:
        self.seen.append(("end", state))


def names(callback: Noting) -> list[str]:
    return [f"{name} {state.step}" for name, state in callback.seen]


@pytest.mark.slow
def test_callbacks_see_the_run_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    callback = Noting()

    config = run_config(
        steps=4, callbacks=("mine",), evaluate=EvaluateConfig(every=2, batches=1), compare_steps=0
    )
    trainer.train(config, with_callback(callback), tmp_path)

    assert names(callback) == [
        "begin 0", "step 1", "evaluate 2", "step 2", "step 3", "evaluate 4", "step 4", "end 4",
    ]  # fmt: skip
    context, last = callback.context, callback.seen[-1][1]
    assert context == TrainingContext(folder=tmp_path, is_first=True, total_steps=4, batch_size=4)
    assert (last.samples, last.tokens, last.epoch) == (16, 64, 2)
    times = [state.train_s for _, state in callback.seen]
    assert times == sorted(times) and times[-1] > 0


@pytest.mark.slow
def test_a_callback_may_ask_for_an_evaluation_and_for_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = {2: TrainerControl(evaluate=True), 3: TrainerControl(stop="that is enough")}
    callback = Noting(asks)

    trainer.train(run_config(steps=9, callbacks=("mine",)), with_callback(callback), tmp_path)

    assert names(callback) == [
        "begin 0", "step 1", "step 2", "evaluate 2", "step 3", "evaluate 3", "end 3",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "stopped after step 3: that is enough" in out
    assert "\n3 steps, " in out
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 2, 3, 3]


@pytest.mark.slow
def test_evaluations_are_logged_with_their_step(tmp_path: Path) -> None:
    evaluate = EvaluateConfig(every=2, batches=2)

    trainer.train(run_config(steps=5, evaluate=evaluate), registry(), tmp_path)

    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4, 5]
    assert all(row["evaluate_s"] > 0 for row in rows if "held_out_loss" in row)


@pytest.mark.slow
def test_evaluation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    for name, evaluate in (
        ("without", EvaluateConfig(batches=0)),
        ("with", EvaluateConfig(every=1, batches=1)),
    ):
        trainer.train(run_config(steps=4, evaluate=evaluate), registry(), tmp_path / name)

    without, having = (rows_of(tmp_path / name) for name in ("without", "with"))
    assert [row["loss"] for row in without] == [row["loss"] for row in having]
    assert not any("held_out_loss" in row for row in without)


def losses(monkeypatch: pytest.MonkeyPatch, found: list[float]) -> None:
    """Let evaluations find these losses, one after the other."""
    left = iter(found)
    monkeypatch.setattr(Evaluator, "metrics", lambda self: {"held_out_loss": next(left)})


@pytest.mark.slow
def test_the_best_held_out_loss_is_remembered_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses(monkeypatch, [math.nan, 3.0, 1.5, 1.5, 2.0])
    callback = Noting()
    config = run_config(steps=5, callbacks=("mine",), evaluate=EvaluateConfig(every=1, batches=1))

    trainer.train(config, with_callback(callback), tmp_path)

    best = [(state.best, state.best_step) for name, state in callback.seen if name == "evaluate"]
    assert best == [(None, None), (3.0, 2), (1.5, 3), (1.5, 3), (1.5, 3)]
    assert (
        "held-out loss: 2.0000 (1 batch); the lowest was 1.5000, after step 3"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_the_checkpoint_of_the_best_is_saved_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(monkeypatch, [3.0, 1.5, 2.0, 1.75, 2.5])
    evaluate = EvaluateConfig(every=1, batches=1)
    checkpoint = CheckpointConfig(every=None, keep=1, best=True)

    config = run_config(steps=5, evaluate=evaluate, checkpoint=checkpoint)
    trainer.train(config, registry(), tmp_path)

    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", "step-00000005"]
    stood_s = [row["save_s"] for row in rows_of(tmp_path)]
    assert stood_s[0] == 0 and min(stood_s[1:3]) > 0


@pytest.mark.slow
def test_times_are_those_of_each_step_and_of_all_parts_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(monkeypatch, [3.0, 2.0, 1.0, 0.5, 0.25])
    monkeypatch.setattr(phases.time, "perf_counter", FakeClock())  # a second a look
    counted: list[tuple[str, float]] = []
    add = phases.PhaseTimes.add

    def adding(self: phases.PhaseTimes, phase: phases.Phase, seconds: float) -> None:
        counted.append((phase, seconds))
        add(self, phase, seconds)

    monkeypatch.setattr(phases.PhaseTimes, "add", adding)
    settings: dict[str, Any] = {
        "evaluate": EvaluateConfig(every=1, batches=1),
        "checkpoint": CheckpointConfig(every=1, wait=True),
        "compare_steps": 0,
        "callbacks": ("mine",),
    }
    first, second = Noting(), Noting()

    trainer.train(run_config(steps=3, **settings), with_callback(first), tmp_path)
    resumed = run_config(steps=5, resume="auto", **settings)
    trainer.train(resumed, with_callback(second), tmp_path)

    rows = rows_of(tmp_path)
    assert [row["evaluate_s"] for row in rows] == [1.0] * 5
    saved_s = rows[1]["save_s"]  # what was between two steps
    assert saved_s > 0 and [row["save_s"] for row in rows] == [0.0, saved_s, saved_s, 0.0, saved_s]
    steps = [[seconds for name, seconds in counted if name == one] for one in ("data", "steps")]
    assert [sum(both) for both in zip(*steps, strict=True)] == [row["step_s"] for row in rows]
    times = [state.train_s for _, state in second.seen if state.step > 3]
    assert times[0] > second.seen[0][1].train_s >= first.seen[-2][1].train_s > 0


@pytest.mark.slow
def test_the_last_step_is_saved_once_as_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(
        RunCheckpoints, "begin", lambda self, session, state, *_: begun.append(state.step)
    )

    trainer.train(run_config(checkpoint=CheckpointConfig(every=1)), registry(), tmp_path)

    assert begun == [1, 2]  # of three steps
    assert [path.name for path in (tmp_path / "checkpoints").glob("s*")] == ["step-00000003"]


def test_of_callbacks_that_would_stop_the_first_says_why() -> None:
    asked = [None, TrainerControl(stop="one"), TrainerControl(stop="other", save=True)]

    assert together(asked) == TrainerControl(stop="one", save=True)


@pytest.mark.slow
def test_a_resumed_run_appends_to_its_metrics_and_goes_on_with_schedule_and_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = ScheduleConfig(decay="cosine", warmup_steps=2)
    found = [3.0, 2.0, 2.5, 2.25, 1.0]
    early = {"name": "early_stop", "patience": 2}
    settings = {
        "steps": 8,
        "schedule": schedule,
        "evaluate": EvaluateConfig(every=1, batches=1),
        "checkpoint": CheckpointConfig(every=2, wait=True),
        "compare_steps": 0,
    }
    losses(monkeypatch, found)
    whole = run_config(callbacks=(early,), **settings)
    trainer.train(whole, registry(), tmp_path / "whole")
    losses(monkeypatch, [*found[:3], *found[2:]])  # the third step is done twice

    class Failing(Callback):
        def on_step_end(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
            if state.step == 3:
                raise SystemExit(9)  # as a kill does, behind the checkpoint of step 2

    plugins = with_callback(Failing())
    monkeypatch.setattr(trainer, "save_states_after_error", lambda *_: None)
    with pytest.raises(SystemExit):
        trainer.train(
            run_config(callbacks=(early, "mine"), **settings), plugins, tmp_path / "parts"
        )
    parts = run_config(callbacks=(early,), resume="auto", **settings)
    capsys.readouterr()
    trainer.train(parts, registry(), tmp_path / "parts")

    assert "(in step 3); predicted" in capsys.readouterr().out
    one, two = (rows_of(tmp_path / name) for name in ("whole", "parts"))
    assert [row["step"] for row in one] == [1, 2, 3, 4]
    for key in ("step", "loss", "lr", "held_out_loss"):
        assert [row[key] for row in one] == [row[key] for row in two], key


@pytest.mark.slow
def test_a_run_that_no_longer_becomes_better_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses(monkeypatch, [3.0, 2.0, 2.5, 1.9999, math.inf, 0.0])
    early = {"name": "early_stop", "patience": 2, "min_delta": 0.01}
    evaluate = EvaluateConfig(every=2, batches=1)

    trainer.train(run_config(steps=20, callbacks=(early,), evaluate=evaluate), registry(), tmp_path)

    assert [row["step"] for row in rows_of(tmp_path)][-1] == 8
    result = read_result(tmp_path)
    assert result is not None
    assert result.stopped_for == "held_out_loss has not improved for 2 evaluations"
    assert (
        "stopped after step 8: held_out_loss has not improved for 2 evaluations"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_metric_that_there_is_not_is_named(tmp_path: Path) -> None:
    early = {"name": "early_stop", "monitor": "accuracy"}
    config = run_config(callbacks=(early,), evaluate=EvaluateConfig(every=1, batches=1))

    with pytest.raises(ConfigError, match="early_stop watches 'accuracy'") as caught:
        trainer.train(config, registry(), tmp_path)

    assert "held_out_loss" in caught.value.accepted


@pytest.mark.slow
def test_what_a_callback_raises_ends_the_run_with_its_states_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Callback):
        def on_step_end(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
            if state.step == 2:
                raise ArithmeticError("it cannot count")

    with pytest.raises(PluginError, match="raised ArithmeticError: it cannot count"):
        trainer.train(run_config(callbacks=("mine",)), with_callback(Failing()), tmp_path)

    assert "the states so far are in" in capsys.readouterr().out
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def test_a_model_that_is_changed_while_it_trains_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing(Callback):
        def on_step_end(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
            if state.step == 2:
                monkeypatch.setattr(Bigram, "logits", lambda self, tokens: self.embed(tokens))

    with pytest.raises(RunError, match=r"Bigram\.logits is (.|\n)*trainer\.init_from"):
        trainer.train(run_config(callbacks=("mine",)), with_callback(Changing()), tmp_path)

    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


@pytest.mark.slow
def test_a_plugin_that_makes_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="callback 'mine' of mine 1 returned int, not a Callback"):
        trainer.train(run_config(callbacks=("mine",)), with_callback(3), tmp_path)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("method", ["on_step_end", "on_evaluate"])
def test_a_callback_that_returns_something_else_is_named(tmp_path: Path, method: str) -> None:
    callback = Callback()
    setattr(callback, method, lambda state, metrics: True)
    config = run_config(callbacks=("mine",), evaluate=EvaluateConfig(every=1, batches=1))

    with pytest.raises(PluginError, match="returned bool, not a TrainerControl or None") as caught:
        trainer.train(config, with_callback(callback), tmp_path)

    assert method in caught.value.where[0]


@pytest.mark.slow
def test_a_budget_of_tokens_ends_the_run(tmp_path: Path) -> None:
    # 16 tokens a step
    trainer.train(run_config(steps=None, tokens=50), registry(), tmp_path)

    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]


def test_a_budget_of_tokens_is_refused_before_planning_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "make_step", lambda *_: 1 / 0)
    run = run_config(steps=None, tokens=50)
    run = replace(run, model=PluginChoice(name="wide"), data=PluginChoice(name="rows"))

    with pytest.raises(ConfigError, match=r"trainer\.tokens=50: the data have no tokens"):
        trainer.train(run, registry(), tmp_path)


@pytest.mark.slow
def test_a_budget_of_time_ends_the_run_behind_the_step_that_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(phases.time, "perf_counter", FakeClock())  # a second a look
    callback = Noting()
    config = run_config(steps=None, hours=40 / 3600, callbacks=("mine",))

    trainer.train(config, with_callback(callback), tmp_path)

    states = [state for name, state in callback.seen if name == "step"]
    assert callback.context is not None and callback.context.total_steps is None
    assert len(states) > 2
    assert states[-1].train_s < 40 <= callback.seen[-1][1].train_s
    out = capsys.readouterr().out
    assert "step 1  loss" in out
    assert f"\n{len(states)} steps, " in out
