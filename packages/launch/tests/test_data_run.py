"""Runs and their data: a sample that cannot be read, and going on with other ranks behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trainable
from torch import Tensor
from trainable import registry, run_config

from sbp_core.errors import ConfigError, SbpError
from sbp_launch.data import SampleOrder
from sbp_launch.settings.config import EvaluateConfig, PluginChoice, RunConfig
from sbp_launch.trainer import trainer

NUM_SAMPLES = 1000


def config(**settings: Any) -> RunConfig:
    """Return a run on random rows, in float64, without what is not looked at."""
    known = {"steps": 6, "dtype": "float64", "compare_steps": 0, "sample_tokens": 0}
    evaluate = EvaluateConfig(batches=0)
    run = run_config(**{**known, "evaluate": evaluate, **settings})
    return replace(run, model=PluginChoice(name="wide"), data=PluginChoice(name="rows"))


class Rows(trainable.Rows):
    """Notes the samples of every call; one of them may be broken."""

    asked: list[list[int]]
    broken: int | None

    def samples(self, numbers: npt.NDArray[np.int64], split: str = "train") -> Mapping[str, Tensor]:
        if split == "train" and self.broken in numbers:
            raise ConfigError("cut off", where="rows.bin, byte 12")
        asked = numbers.tolist()
        is_fingerprint = asked[0] == 0 and asked[-1] == NUM_SAMPLES - 1
        if len(set(asked)) > 1 and not is_fingerprint:  # no example, no search
            self.asked.append(asked)
        return super().samples(numbers, split)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> type[Rows]:
    monkeypatch.setattr(trainable, "make_rows", lambda config: Rows())
    monkeypatch.setattr(Rows, "asked", [], raising=False)
    monkeypatch.setattr(Rows, "broken", None, raising=False)
    return Rows


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_a_run_goes_on_behind_a_broken_sample_on_other_ranks_with_each_sample_once(
    rows: type[Rows], tmp_path: Path
) -> None:
    order = SampleOrder(num_samples=NUM_SAMPLES)
    expected = order.numbers(np.arange(24)).tolist()
    trainer.train(config(prefetch=3), registry(), tmp_path / "unbroken")
    assert [number for numbers in rows.asked for number in numbers] == expected
    rows.asked.clear()

    rows.broken = expected[9]  # of the third batch
    with pytest.raises(ConfigError, match="cut off") as caught:
        trainer.train(config(prefetch=3), registry(), tmp_path / "parts")
    assert caught.value.where == (
        "rows.bin, byte 12",
        f"sample {expected[9]} of split 'train' of data 'rows'",
    )
    assert len(losses(tmp_path / "parts")) == 2
    taken = [number for numbers in rows.asked for number in numbers][:8]
    rows.asked.clear()

    rows.broken = None
    # The same samples, two a step on four ranks, in micro-batches of one.
    on = config(mesh=(4,), batch_size=2, micro_batches=2, steps=10, resume="auto")
    trainer.train(on, registry(), tmp_path / "parts")
    taken += [number for numbers in rows.asked for number in numbers]

    assert taken == expected


@pytest.mark.slow
def test_a_run_on_other_ranks_has_the_losses_of_the_unbroken_one(
    rows: type[Rows], tmp_path: Path
) -> None:
    trainer.train(config(), registry(), tmp_path / "unbroken")
    rows.broken = int(SampleOrder(num_samples=NUM_SAMPLES).numbers(np.array([13]))[0])
    with pytest.raises(SbpError):
        trainer.train(config(), registry(), tmp_path / "parts")
    rows.broken = None

    on = config(mesh=(4,), micro_batches=2, resume="auto")
    trainer.train(on, registry(), tmp_path / "parts")

    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "unbroken"), abs=1e-12)


@pytest.mark.slow
def test_a_broken_sample_of_evaluation_is_named(
    rows: type[Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = trainable.Rows.samples

    def fails(self: object, numbers: Any, split: str = "train") -> Mapping[str, Tensor]:
        if split == "validation":
            raise KeyError("colour")
        return load(self, numbers, split)

    monkeypatch.setattr(trainable.Rows, "samples", fails)
    run = config(evaluate=EvaluateConfig(batches=1))

    with pytest.raises(SbpError, match="of split 'validation': KeyError: 'colour'"):
        trainer.train(run, registry(), tmp_path)

    assert len(losses(tmp_path)) >= 5


@pytest.mark.slow
def test_a_run_does_not_go_on_in_other_data(
    rows: type[Rows],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer.train(config(steps=2), registry(), tmp_path)
    load = trainable.Rows.samples

    def last_is_other(
        self: object, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, Tensor]:
        found = load(self, numbers, split)
        for value in found.values():
            value[numbers == NUM_SAMPLES - 1] += 1
        return found

    def refused(says: str) -> None:
        with pytest.raises(ConfigError, match=says) as caught:
            trainer.train(config(resume="auto"), registry(), tmp_path)
        assert "manifest.json" in caught.value.where[0]

    with monkeypatch.context() as patch:
        patch.setattr(rows, "num_samples", lambda self, split="train": 999)
        refused("the train split had 1,000 samples, and has 999")
    monkeypatch.setattr(trainable.Rows, "samples", last_is_other)
    refused("the samples of the train split have changed")

    trainer.train(config(resume="auto", allow_other_data=True), registry(), tmp_path)

    out = capsys.readouterr().out
    assert "other than in step-00000002: the samples of the train split have changed" in out
    assert len(losses(tmp_path)) == 6
