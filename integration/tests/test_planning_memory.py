"""Planning needs shapes only: the memory that it takes does not grow with classes or rows.

Each program is planned in a process of its own, whose peak of resident memory counts. PyTorch and
the planners take about 400 MB of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

#: Runs `sbp-plan` with its arguments, and prints the peak of the process in bytes.
_PLAN = textwrap.dedent("""
    import resource, sys
    from sbp_launch.apps.plan import main
    try:
        main()
    except SystemExit as error:
        assert not error.code, error.code
    print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
""")

#: Plans a model of the user's, without data: `argv` has its rows, how it is made, its optimizer.
_PARALLELIZE = textwrap.dedent("""
    import resource, sys
    import torch
    from torch import nn
    from sbp_launch import parallelize
    from sbp_torch import deferred

    rows, how, optimizer = int(sys.argv[1]), sys.argv[2], getattr(torch.optim, sys.argv[3])

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(rows, 512)
            self.head = nn.Linear(512, rows)

        def forward(self, x):
            return self.head(self.rows(x).relu())

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    given, states = deferred(Table, seed=0), None
    model = given.model
    if how == "meta":
        states = {name: torch.zeros(()).expand(one.shape) for name, one in model.named_parameters()}
        given = model
    batch = {"x": torch.arange(8), "y": torch.arange(8)}
    step = parallelize(given, loss, batch, optimizer(model.parameters()), mesh=4, states=states)
    step.report(max_rows=0)
    print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
""")

_MILLION = ["model=resnet", "model.num_classes=1000000"]


def peak_bytes(folder: Path, program: str, arguments: list[str]) -> int:
    """Return the peak of the resident memory of a program in a process of its own."""
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},  # proofs of earlier runs are not known
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split("peak ")[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            [
                *_MILLION,
                "model.width=64",
                "planner=manual/class_parallel",
                "cluster.mesh=[4]",
                "cluster.axes=[classes]",
                "cluster.memory_bytes=8e9",
            ],
            id="class parallel",
        ),
        pytest.param([*_MILLION, "compile.passes.split_classes=null"], id="whole classes"),
        pytest.param(["model=vit", "model.num_classes=1000000"], id="vit"),
        pytest.param(["model=dlrm", "model.rows=[4000000,2000,100]", "model.hidden=64"], id="dlrm"),
        pytest.param(
            ["model=hf/gpt2", "model.overrides.vocab_size=200000"],
            id="hf",
            marks=pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers"),
        ),
    ],
)
def test_a_million_classes_or_rows_are_planned_in_a_gigabyte(
    arguments: list[str], tmp_path: Path
) -> None:
    assert peak_bytes(tmp_path, _PLAN, arguments) < 1e9


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["model=gpt"],
        ["model=llama"],
        ["model=gpt", "optimizer=sgd", "cluster.mesh=[1,1]"],
        ["model=gpt", "optimizer=adagrad", "cluster.mesh=[1,1]"],
        ["model=gpt", "optimizer=adafactor"],
        ["model=gpt", "planner=auto", "cluster.mesh=[2]", "cluster.axes=[data]"],
    ],
    ids=" ".join,
)
def test_a_large_vocabulary_is_planned_in_the_memory_of_a_small_one(
    arguments: list[str], tmp_path: Path
) -> None:
    own = ["model.num_layers=1", "model.hidden=512", "cluster.memory_bytes=64e9"]

    small, large = (
        peak_bytes(tmp_path, _PLAN, [*arguments, *own, f"model.vocabulary={size}"])
        for size in (256, 200_000)
    )

    assert large - small < 100e6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "optimizer"), [("deferred", "AdamW"), ("meta", "SGD"), ("deferred", "Adafactor")]
)
def test_a_model_of_the_users_without_data_is_planned_and_proved_in_a_gigabyte(
    how: str, optimizer: str, tmp_path: Path
) -> None:
    assert peak_bytes(tmp_path, _PARALLELIZE, ["400000", how, optimizer]) < 1e9
