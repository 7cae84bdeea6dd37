"""A run that is stopped and goes on is the one that nobody stopped, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import watched_run
from checkpoints import saved_states

from forked import run_command

STEPS = 6

SETTINGS = (
    "--config-dir",
    watched_run.OPTIONS,
    f"trainer.steps={STEPS}",
    "trainer.checkpoint.every=1",
    "trainer.checkpoint.keep=0",
    "trainer.evaluate.batches=1",
    "trainer.sample_tokens=0",
    "trainer.compare_steps=0",
    "trainer.plan_rows=0",
    "trainer.batch_size=4",
    "cluster.mesh=[2]",
)

GPT = ("model=tied_gpt", "data=noted", "model.dropout=0.1")

#: What an update has beside the optimizer, a learning rate that moves, and evaluation between.
UPDATE = (
    "trainer.schedule.decay=cosine",
    "trainer.schedule.warmup_steps=2",
    "trainer.update.clip_norm=1.0",
    "trainer.update.ema_decay=0.9",
    "trainer.evaluate.every=2",
)

#: A loss scale that grows behind each step, and shrinks behind one that overflows: the fifth.
SCALING = (
    "compile.autocast=float16",
    "trainer.update.loss_scaling={init_scale: 16384.0, growth_interval: 1}",
    "trainer.on_nan=warn",
)

DATA_PARALLEL = ("planner=manual/data_parallel", "cluster.axes=[data]")
ZERO = ("planner=manual/zero", "cluster.axes=[data]")
PIPELINE = ("planner=manual/pipeline", "cluster.axes=[pipe]", "trainer.micro_batches=2")
CLICKS = ("model=dlrm", "model.rows=[40,20]")
EACH = ("trainer.loss=mean_of_micro_batches",)
IMAGES = ("model=resnet", "model.width=4", "data.image_size=16")
MOMENTUM = ("optimizer=sgd", "optimizer.momentum=0.9")
VIT = (
    "model=vit",
    "model.num_layers=1",
    "model.hidden=16",
    "model.num_heads=2",
    "model.patch_size=8",
    "model.image_size=16",
    "model.dropout=0.1",
    "model.drop_path=0.1",
)

CASES = {
    "loss scale": (*GPT, *ZERO, *UPDATE, *SCALING, "trainer.micro_batches=2"),
    "loss scale, lock-step": (*GPT, *ZERO, *SCALING, "runtime=reference"),
    "loss scale, pipeline": (*GPT, *PIPELINE, *UPDATE, *SCALING),
    "loss scale, gloo": (*GPT, *ZERO, *UPDATE, *SCALING, "boxing=torch"),
    "loss scale, mpi": (*GPT, *ZERO, *UPDATE, *SCALING, "boxing=mpi"),
    "pipeline, gloo": (*GPT, *PIPELINE, *UPDATE, "boxing=torch"),
    "pipeline, mpi": (*GPT, *PIPELINE, *UPDATE, "boxing=mpi"),
    "lock-step": (*GPT, *DATA_PARALLEL, *UPDATE, "runtime=reference", "trainer.micro_batches=2"),
    "numbers of each shard": (*VIT, *DATA_PARALLEL, *UPDATE, "compile.random=per_shard"),
    "vit": (*VIT, *PIPELINE, *UPDATE),
    "batch norm": (*IMAGES, *ZERO, *MOMENTUM, *UPDATE, "trainer.micro_batches=2", *EACH),
    "batch norm, gloo": (*IMAGES, *DATA_PARALLEL, *MOMENTUM, "boxing=torch"),
    "clicks": (*CLICKS, *DATA_PARALLEL, *UPDATE),
    "clicks, mpi": (*CLICKS, *ZERO, "optimizer=adagrad", "boxing=mpi"),
    "unfused": (*GPT, *ZERO, *UPDATE, "trainer.update.fused=false"),
    "states beside": (*GPT, *ZERO, "compile.in_place_states=false", "compile.boxing_thread=true"),
    **{
        optimizer: (*GPT, *ZERO, *UPDATE, f"optimizer={optimizer}")
        for optimizer in ("adafactor", "adam", "lamb", "lion", "muon", "rmsprop")
    },
}


def trained(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run `sbp-train`; return what it has logged of its steps, but for times."""
    code, printed = run_command(["sbp_launch.apps.train", *SETTINGS, *overrides], folder)
    assert code == 0, printed
    run = next(text.partition("=")[2] for text in overrides if text.startswith("hydra.run.dir="))
    lines = (folder / run / "metrics.jsonl").read_text("utf-8").splitlines()
    kept = ("step", "loss", "lr", "grad_norm", "skipped", "held_out_loss")
    return [{key: row[key] for key in kept if key in row} for row in map(json.loads, lines)]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "stop"), [(case, 1 + number % (STEPS - 1)) for number, case in enumerate(CASES)]
)
def test_it_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, stop: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", watched_run.installed(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(tmp_path)
    whole = trained(tmp_path, *CASES[case], "hydra.run.dir=whole")
    resume = f"trainer.resume=whole/checkpoints/step-{stop:08d}"

    rest = trained(tmp_path, *CASES[case], "hydra.run.dir=rest", resume)

    assert rest == whole[stop:]
    wanted, found = saved_states(tmp_path / "whole"), saved_states(tmp_path / "rest")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    if "loss scale" in case:
        skipped = [row["skipped"] for row in whole]
        assert 0.0 in skipped and 1.0 in skipped, "the scale has to grow and to shrink"
