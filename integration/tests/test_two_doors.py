"""`parallelize` and `sbp-train` are two doors of one step: the same plan, losses and files.

The program of a config is given to both: to `sbp-train` as the config says, and to `parallelize` as
a model, a loss, a batch and an optimizer, with the same settings as arguments.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sbp_core.errors import SbpError
from sbp_core.plugins import discover
from sbp_launch import parallelize
from sbp_launch.apps.train import make_application
from sbp_launch.checkpoint.local import LocalStorage
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.parallelize import ParallelStep
from sbp_launch.run.run import Run
from sbp_launch.settings import compose as settings
from sbp_launch.settings.catalog import make_catalog
from sbp_launch.settings.check import check
from sbp_launch.settings.config import RunConfig
from sbp_launch.trainer import trainer
from sbp_launch.trainer.program import Program, make_program, model_loss
from sbp_launch.world import World

#: A model of two layers, on ranks that are threads.
SMALL = (
    "model=gpt model.num_layers=2 model.hidden=32 model.num_heads=4 model.context=16 "
    "trainer.batch_size=8 trainer.dtype=float64 trainer.steps=2 trainer.compare_steps=0 "
    "trainer.sample_tokens=0 trainer.evaluate.batches=0 trainer.plan_rows=0"
)

#: What does not fit without micro-batches, recomputation or slices; and what fits anyhow.
TIGHT, LOOSE = 1_400_000, 100_000_000

slow = pytest.mark.slow


def config_of(*overrides: str) -> RunConfig:
    """Return the config of a run."""
    app = make_application(World())
    catalog = make_catalog(discover(), None)
    composed = settings.compose(catalog, app, [*SMALL.split(), *overrides])
    return check(settings.read(composed, catalog), catalog.registry, [])


def by_parallelize(
    config: RunConfig, program: Program, planner: dict[str, Any], memory_bytes: float, **more: Any
) -> ParallelStep:
    """Return the step of the program of a config, with the same settings as arguments."""
    return parallelize(
        program.made,
        model_loss,
        program.example(config.trainer.batch_size),
        program.optimizer,
        mesh=config.mesh,
        axes=config.axes,
        planner=planner,
        cluster={"name": "local", "memory_bytes": memory_bytes},
        update=config.trainer.update,
        seed=config.trainer.seed,
        **more,
    )


def decided(folder: Path) -> dict[str, Any]:
    """Return the strategy in a folder without its report: a bound depends on how long it took."""
    found: dict[str, Any] = json.loads((folder / "strategy.json").read_text())
    del found["report"]
    return found


CASES = [
    pytest.param("infer", "[2]", LOOSE, 1),
    pytest.param("osdp", "[2]", TIGHT, "auto"),
    pytest.param("infer", "[4]", TIGHT, "auto", marks=slow),
    pytest.param("manual/tensor_parallel", "[2]", LOOSE, 2, marks=slow),
    pytest.param("osdp", "[4]", TIGHT, 1, marks=slow),
    pytest.param("ilp", "[2]", TIGHT, "auto", marks=slow),
    pytest.param("ilp", "[2]", LOOSE, 2, marks=slow),
    pytest.param("auto", "[2]", TIGHT, "auto", marks=slow),
    pytest.param("galvatron", "[2]", TIGHT, "auto", marks=slow),
]


@pytest.mark.parametrize(("planner", "mesh", "memory_bytes", "micro_batches"), CASES)
def test_both_doors_plan_train_and_save_alike(
    planner: str, mesh: str, memory_bytes: float, micro_batches: int | str, tmp_path: Path
) -> None:
    axes = ["cluster.axes=[tensor]"] if "tensor" in planner else []
    config = config_of(
        f"planner={planner}",
        f"cluster.mesh={mesh}",
        f"cluster.memory_bytes={memory_bytes:.0f}",
        f"trainer.micro_batches={micro_batches}",
        *axes,
    )
    trained = tmp_path / "trained"
    trainer.train(config, discover(), trained)
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    program = make_program(Run(config=config, registry=discover()))

    with by_parallelize(
        config, program, {"name": planner}, memory_bytes, micro_batches=micro_batches
    ) as step:
        cursor, losses = program.cursor(), []
        for index in range(config.trainer.budget.amount):
            batch = program.batch(cursor.advanced(8 * index), 8)
            losses.append(float(step(batch, lr=rows[index]["lr"])))
        step.save(tmp_path / "saved")

    assert (trained / "plan.json").read_bytes() == (tmp_path / "saved" / "plan.json").read_bytes()
    assert decided(trained) == decided(tmp_path / "saved")
    assert losses == [row["loss"] for row in rows]
    with (
        Checkpoint(LocalStorage(trained / "checkpoints"), "step-00000002") as first,
        Checkpoint(LocalStorage(tmp_path / "saved"), "step-00000002") as second,
    ):
        assert set(first) == set(second)
        assert all(torch.equal(first[name], second[name]) for name in first)
        pieces = [
            {name: [piece.bounds for piece in one.manifest.tensors[name].pieces] for name in one}
            for one in (first, second)
        ]
        assert pieces[0] == pieces[1]


def test_what_fits_by_neither_door_is_refused_in_the_words_of_each() -> None:
    config = config_of("planner=osdp", "cluster.mesh=[2]", "trainer.micro_batches=1")
    program = make_program(Run(config=config, registry=discover()))
    planner = {"name": "osdp", "memory_bytes": 1000.0}

    with pytest.raises(SbpError) as caught:
        by_parallelize(config, program, planner, LOOSE)

    assert "planner={'memory_bytes': ...} >= " in caught.value.accepted
    assert "planner.memory_bytes" not in str(caught.value)
    assert "trainer." not in str(caught.value)
