"""A run that goes from layout to layout is the run on one device, and takes each sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import watched_run
from checkpoints import saved_states
from small_runs import losses

from forked import run_command
from sbp_launch.data import SampleOrder

#: Steps of each part, samples of a step, and of a pass: the run takes two passes and a part.
STEPS, BATCH_SIZE, NUM_SAMPLES = 3, 8, 40

#: Where a run is, one after the other, and which processes load the samples of a step together.
LAYOUTS = (
    ("planner=manual/data_parallel", "cluster.mesh=[4]", "cluster.axes=[data]"),
    ("planner=manual/tensor_parallel", "cluster.mesh=[2,2]", "cluster.axes=[pipe,tensor]"),
    ("planner=manual/zero", "cluster.mesh=[2]", "cluster.axes=[data]"),
    ("cluster.mesh=[1]", "cluster.axes=[data]"),
)

SETTINGS = (
    "--config-dir",
    watched_run.OPTIONS,
    "model=tied_gpt",
    "data=noted",
    f"data.num_samples={NUM_SAMPLES}",
    f"trainer.batch_size={BATCH_SIZE}",
    "trainer.micro_batches=2",
    "trainer.schedule.decay=cosine",
    "trainer.schedule.warmup_steps=4",
    "trainer.update.clip_norm=1.0",
    "trainer.update.ema_decay=0.9",
    "trainer.evaluate.batches=0",
    "trainer.compare_steps=0",
    "trainer.sample_tokens=0",
    "trainer.plan_rows=0",
    "optimizer.lr=0.01",
)

#: Of a loss, relative to that of the unbroken run.
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder in which `sbp-train` knows the watched model and data."""
    monkeypatch.setenv("PYTHONPATH", watched_run.installed(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(tmp_path)  # of commands that are copies of this process
    return tmp_path


def train(folder: Path, *overrides: str) -> list[list[list[int]]]:
    """Run `sbp-train`; return the samples that each process has loaded for each step."""
    code, printed = run_command(["sbp_launch.apps.train", *SETTINGS, *overrides], folder)
    assert code == 0, printed
    found = watched_run.loaded(folder)
    for path in (folder / watched_run.NOTES).iterdir():
        path.unlink()
    return found


def samples_of_steps(processes: list[list[list[int]]]) -> list[list[int]]:
    """Return the samples of each step, each once; a process loads none of them twice."""
    steps = []
    # What is loaded ahead when a run stops is not used.
    for parts in islice(zip(*processes, strict=False), STEPS):
        assert all(len(set(part)) == len(part) for part in parts)
        counts = Counter(number for part in parts for number in part)
        assert len(set(counts.values())) == 1, "as many processes hold each of them"
        steps.append(list(counts))
    return steps


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("boxing", "dtype", "dropout"),
    [
        pytest.param(
            boxing,
            dtype,
            dropout,
            marks=()
            if (boxing, dtype, dropout) == ("local", "float64", 0.1)
            else pytest.mark.exhaustive,
        )
        for boxing in ("local", "torch", "mpi")
        for dtype in TOLERANCE
        for dropout in (0.0, 0.1)
    ],
)
def test_a_run_goes_from_layout_to_layout_as_if_on_one_device(
    folder: Path, boxing: str, dtype: str, dropout: float
) -> None:
    program = (f"trainer.dtype={dtype}", f"model.dropout={dropout}")
    total = STEPS * len(LAYOUTS)
    found, taken = [], []
    for number, layout in enumerate(LAYOUTS):
        is_alone = "cluster.mesh=[1]" in layout
        # The schedule is that of the whole run, which is stopped when a part of it is over.
        processes = train(
            folder,
            *program,
            *layout,
            f"boxing={'local' if is_alone else boxing}",
            f"trainer.steps={total}",
            f"trainer.callbacks=[{{name: stop_behind, step: {STEPS * (number + 1)}}}]",
            f"hydra.run.dir=part{number}",
            *([f"trainer.resume=part{number - 1}"] if number else []),
        )
        assert len(processes) == 1 if is_alone or boxing == "local" else len(processes) > 1
        taken += samples_of_steps(processes)
        found += losses(folder / f"part{number}")

    train(folder, *program, *LAYOUTS[-1], f"trainer.steps={total}", "hydra.run.dir=whole")

    wanted = SampleOrder(num_samples=NUM_SAMPLES).numbers(np.arange(total * BATCH_SIZE)).tolist()
    for step, numbers in enumerate(taken):
        assert sorted(numbers) == sorted(wanted[step * BATCH_SIZE :][:BATCH_SIZE])
    assert len(taken) == len(found) == total
    assert found == pytest.approx(losses(folder / "whole"), rel=TOLERANCE[dtype], abs=0.0)
    if dtype == "float64":  # elements of averages that cancel out have fewer digits in float32
        states, whole = (saved_states(folder / name) for name in (f"part{number}", "whole"))
        assert states.keys() == whole.keys()
        for name, value in whole.items():
            assert (states[name] - value).abs().max().item() <= 1e-9, name
