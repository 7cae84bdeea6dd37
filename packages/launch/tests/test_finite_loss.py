"""A run whose loss is no number stops and says so, unless it is told to go on."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_states import states_of_run
from trainable import Bigram, registry, run_config

from sbp_aten.pass_options import MixedPrecision, PassOptions
from sbp_core.runtime import StepResult
from sbp_launch.checkpoint import Checkpoint, LocalStorage
from sbp_launch.settings.config import RunConfig
from sbp_launch.trainer import trainer
from sbp_launch.trainer.finite_loss import MOST_SKIPPED, FiniteLoss, NotFiniteError
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.update_options import LossScaling, UpdateOptions

RATES = {"lr": 0.5}


def poisoned_at(
    monkeypatch: pytest.MonkeyPatch, number: int, value: float, *, last: int | None = None
) -> None:
    """Let the loss of a step, counted from 1, be no number; or those of all up to the last."""
    step, taken = ReferenceSession.step, []

    def poisoned(self: ReferenceSession, *given: Any, **named: Any) -> StepResult:
        taken.append(None)
        result = step(self, *given, **named)
        if not number <= len(taken) <= (last or number):
            return result
        return replace(result, outputs={**result.outputs, "loss": torch.tensor(value)})

    monkeypatch.setattr(ReferenceSession, "step", poisoned)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_its_states_apart(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: float,
) -> None:
    poisoned_at(monkeypatch, 3, value)
    kept = tmp_path / "checkpoints" / "not-finite-00000003"

    with pytest.raises(NotFiniteError) as caught:
        trainer.train(run_config(steps=5, micro_batches=2), registry(), tmp_path)

    assert re.fullmatch(
        rf"the loss is {value}; the last finite loss was \d\.\d{{4}}, of step 2", caught.value.what
    )
    assert caught.value.where == ("step 3 of 5 steps (lr 0.001)",)
    assert "optimizer.lr, trainer.update.clip_norm=1.0" in caught.value.todo
    assert "trainer.on_nan=warn" in caught.value.todo
    assert f"the states so far are in checkpoints/{kept.name}" in capsys.readouterr().out
    assert states_of_run(tmp_path) == {}
    with Checkpoint(LocalStorage(kept.parent), kept.name) as states:
        assert states["head.weight.step"].item() == 3
    records = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_that_is_told_to_go_on_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned_at(monkeypatch, 2, math.nan, last=3)

    trainer.train(run_config(steps=4, on_nan="warn"), registry(), tmp_path)

    out = capsys.readouterr().out
    assert re.findall("warning: the loss is nan in step (.) of 4 steps", out) == ["2"]
    assert states_of_run(tmp_path)["head.weight.step"].item() == 4


def watch(*, on_nan: str = "stop", **changes: Any) -> FiniteLoss:
    return FiniteLoss(run_config(on_nan=on_nan, **changes))


def test_gradients_without_a_norm_stop_the_run_before_the_next_loss_does() -> None:
    with pytest.raises(NotFiniteError, match="the norm of the gradients is inf"):
        watch().check(1, {"loss": 1.0, "grad_norm": math.inf}, RATES)


def test_an_overflow_that_loss_scaling_handles_is_no_error_unless_it_never_ends() -> None:
    finite = watch()
    overflow = {"loss": math.inf, "grad_norm": math.nan, "skipped": 1.0}

    for index in range(MOST_SKIPPED):
        assert finite.check(index + 1, overflow, RATES) == ""
    assert finite.check(90, {"loss": 2.0, "grad_norm": 1.0, "skipped": 0.0}, RATES) == ""
    for index in range(MOST_SKIPPED):
        assert finite.check(index + 91, overflow, RATES) == ""

    with pytest.raises(NotFiniteError, match=r"has skipped 31 steps in a row; .* of step 90"):
        finite.check(200, overflow, RATES)


def test_a_loss_that_loss_scaling_did_not_skip_is_an_error() -> None:
    with pytest.raises(NotFiniteError, match="the loss is nan; no loss was finite"):
        watch().check(1, {"loss": math.nan, "skipped": 0.0}, RATES)


@pytest.mark.slow
def test_a_run_with_loss_scaling_survives_the_search_for_a_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Bigram.loss
    monkeypatch.setattr(Bigram, "loss", lambda self, batch: 10_000 * loss(self, batch))
    update = UpdateOptions(fused=False, loss_scaling=LossScaling(init_scale=3e38))

    trainer.train(run_config(steps=4, compare_steps=0, update=update), registry(), tmp_path)

    records = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    assert json.loads(records[0])["skipped"] == 1.0
    assert json.loads(records[-1])["step"] == 4


def advice(config: RunConfig) -> str:
    with pytest.raises(NotFiniteError) as caught:
        FiniteLoss(config).check(1, {"loss": math.nan}, RATES)
    return caught.value.todo


def test_what_is_set_already_is_not_advised_and_half_precision_wants_scaling() -> None:
    clipped = run_config(update=UpdateOptions(clip_norm=1.0))
    half = run_config()
    half = replace(half, compile=replace(half.compile, autocast="float16"))
    passes = PassOptions(mixed_precision=MixedPrecision(dtype="float16"))
    lowered = run_config()
    lowered = replace(lowered, compile=replace(lowered.compile, passes=passes))

    assert "clip_norm" not in advice(clipped)
    assert "loss_scaling" not in advice(clipped)
    for config in (half, lowered):
        assert advice(config).startswith("try trainer.update.loss_scaling={init_scale:65536.0}")
