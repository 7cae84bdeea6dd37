"""`parallelize` and `sbp-train` are two doors of one step: the same plan, losses and files.

The same program goes through both: to `sbp-train` as a config, and to `parallelize` as a model, a
loss, a batch and an optimizer, with the same settings as arguments.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sbp_core.errors import SbpError
from sbp_core.plugins import discover
from sbp_launch import parallelize
from sbp_launch.parallel import ParallelStep
from sbp_torch.deferred_init import deferred
from sbp_torch.graph_capture import UpdateOptions

#: A model of two layers.
MODEL = {"num_layers": 2, "hidden": 32, "num_heads": 4, "context": 16}

STEPS, BATCH_SIZE, SEED = 2, 8, 0

RUN = (
    f"trainer.steps={STEPS} trainer.batch_size={BATCH_SIZE} trainer.seed={SEED} "
    "trainer.dtype=float64 trainer.order=sequential trainer.compare_steps=0 trainer.plan_rows=0 "
    "trainer.sample_tokens=0 trainer.evaluate.batches=0"
)

#: What does not fit without micro-batches, recomputation or slices; and what fits anyhow.
TIGHT, LOOSE = 1_400_000, 100_000_000

slow = pytest.mark.slow


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """Run `sbp-train` in this process, into a folder."""
    model = [f"model.{name}={value}" for name, value in MODEL.items()]
    arguments = ["model=gpt", *model, *RUN.split(), *overrides, f"hydra.run.dir={folder}"]
    monkeypatch.setattr(sys, "argv", ["sbp-train", *arguments])
    monkeypatch.delitem(sys.modules, "sbp_launch.apps.train", raising=False)
    with pytest.raises(SystemExit) as exited:
        runpy.run_module("sbp_launch.apps.train", run_name="__main__")
    assert exited.value.code == 0


def loss(model: Any, batch: Mapping[str, Tensor]) -> Any:
    """Return what the model gives of a batch."""
    return model.losses(batch) if hasattr(model, "losses") else model.loss(batch)


def batch_of(step: int) -> dict[str, Tensor]:
    """Return the batch of a step, counted from 0."""
    data = discover().make("data", "stdlib", {"context": MODEL["context"]})
    numbers = np.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
    return dict(data.samples(numbers, "train"))


def by_parallelize(mesh: tuple[int, ...] | dict[str, int], **settings: Any) -> ParallelStep:
    """Return the step of the same program, with settings as arguments."""
    registry = discover()

    def build() -> nn.Module:
        model: nn.Module = registry.make("model", "gpt", MODEL)
        return model.to(torch.float64).train()

    made = deferred(build, SEED)
    optimizer = registry.make("optimizer", "adamw", {})(made.model.parameters())
    update = UpdateOptions(fused=True)
    given = made, loss, batch_of(0), optimizer
    return parallelize(*given, mesh=mesh, update=update, seed=SEED, **settings)


def decided(folder: Path) -> dict[str, Any]:
    """Return the strategy in a folder without its report: a bound depends on how long it took."""
    found: dict[str, Any] = json.loads((folder / "strategy.json").read_text())
    del found["report"]
    return found


CASES = [
    pytest.param("propagate", (2,), LOOSE, 1),
    pytest.param("osdp", (2,), TIGHT, "auto"),
    pytest.param("propagate", (4,), TIGHT, "auto", marks=slow),
    pytest.param("manual/tensor_parallel", (2,), LOOSE, 2, marks=slow),
    pytest.param("osdp", (4,), TIGHT, 1, marks=slow),
    pytest.param("greedy", (2,), LOOSE, 2, marks=slow),
    pytest.param("ilp", (2,), LOOSE, 2, marks=slow),
    pytest.param("auto", (2,), TIGHT, "auto", marks=slow),
    pytest.param("galvatron", (2,), TIGHT, "auto", marks=slow),
]


@pytest.mark.parametrize(("planner", "mesh", "memory_bytes", "micro_batches"), CASES)
def test_both_doors_plan_train_and_save_alike(
    planner: str,
    mesh: tuple[int, ...],
    memory_bytes: int,
    micro_batches: int | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained, saved = tmp_path / "trained", tmp_path / "saved"
    axes = ("tensor",) if "tensor" in planner else ("data",)
    train(
        trained,
        monkeypatch,
        f"planner={planner}",
        f"cluster.mesh=[{prod(mesh)}]",
        f"cluster.axes=[{axes[0]}]",
        f"cluster.memory_bytes={memory_bytes}",
        f"trainer.micro_batches={micro_batches}",
    )
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    cluster = {"name": "local", "memory_bytes": memory_bytes}

    with by_parallelize(
        dict(zip(axes, mesh, strict=True)) if axes else mesh,
        planner=planner,
        cluster=cluster,
        micro_batches=micro_batches,
    ) as step:
        losses = [float(step(batch_of(at), lr=rows[at]["lr"])) for at in range(STEPS)]
        step.save(saved)

    assert losses == [row["loss"] for row in rows]
    assert (trained / "plan.json").read_bytes() == (saved / "plan.json").read_bytes()
    assert decided(trained) == decided(saved)
    first, second = trained / "checkpoints" / "step-00000002", saved / "step-00000002"
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    pieces = [name for name in names if not name.endswith(".json")]
    assert pieces
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in pieces)


def test_what_fits_by_neither_door_is_refused_in_the_words_of_each() -> None:
    planner = {"name": "osdp", "memory_bytes": 1000.0}

    with pytest.raises(SbpError) as caught:
        by_parallelize((2,), planner=planner)

    assert "planner={'memory_bytes': ...} >= " in caught.value.accepted
    assert "planner.memory_bytes" not in str(caught.value)
    assert "trainer." not in str(caught.value)
