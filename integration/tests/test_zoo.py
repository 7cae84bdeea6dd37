"""Every model of the zoo plans and trains as it is named, on any mesh, without a further word.

`sbp-train model=M` chooses the data that fit the model, and a plan for the mesh; the losses of the
first steps are those of one device. Sizes are small, so that all of it is a matter of a minute.
"""

from __future__ import annotations

import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

#: Settings that make each model small.
ZOO = {
    "gpt": "num_layers=2 hidden=32 num_heads=4 context=16",
    "llama": "num_layers=2 hidden=32 num_heads=4 num_key_heads=2 mlp_hidden=48 context=16",
    "moe": "num_layers=1 hidden=32 num_heads=4 num_key_heads=2 mlp_hidden=48 context=16",
    "bert": "num_layers=2 hidden=32 num_heads=4 context=16",
    "t5": "num_layers=1 hidden=32 num_heads=4 head_width=8 mlp_hidden=64",
    "resnet": "width=4",
    "vit": "num_layers=2 hidden=32 num_heads=4 image_size=16",
    "dlrm": "rows=[40,20,10,4] hidden=8 bottom=[16] top=[16]",
}

#: Those of `transformers`, as they are named: small already.
OTHERS = ("hf/gpt2", "hf/llama", "hf/mixtral", "hf/bert", "hf/t5", "hf/vit")

WITH_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

#: The largest deviation from one device of a loss in float64, relative.
TOLERANCE = 1e-9

RUN = (
    "trainer.dtype=float64",
    "trainer.steps=3",
    "trainer.batch_size=8",
    "trainer.evaluate.batches=0",
    "trainer.sample_tokens=0",
    "trainer.plan_rows=0",
)


def train(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `sbp-train` in this process, which takes a fifth of the time of another one."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["sbp-train", *arguments, *RUN])
    monkeypatch.delitem(sys.modules, "sbp_launch.apps.train", raising=False)  # of another test
    with pytest.raises(SystemExit) as exited:
        runpy.run_module("sbp_launch.apps.train", run_name="__main__")
    assert exited.value.code == 0


def deviation(output: str) -> float:
    """Return the largest relative deviation from one device that a run printed."""
    found = re.search(r"first 3 steps: \S+ \((\S+) relative\)", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["[4]", "[2,2]", pytest.param("[2]", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    "model", [*ZOO, *(pytest.param(model, marks=WITH_TRANSFORMERS) for model in OTHERS)]
)
def test_a_model_trains_by_default_like_one_device(
    model: str,
    mesh: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = [f"model.{setting}" for setting in ZOO.get(model, "").split()]
    if model == "t5":
        small.append("data.context=16")  # it has no limit of its own

    train([f"model={model}", f"cluster.mesh={mesh}", *small], tmp_path, monkeypatch)

    assert deviation(capsys.readouterr().out) <= TOLERANCE


#: Softmaxes in parts, over however few classes.
IN_PARTS = [f"compile.passes.split_classes.{entry}" for entry in ("when=always", "min_classes=2")]

#: Preset -> what it takes, and the models that have the pattern.
PATTERNS: dict[str, tuple[list[str], list[str]]] = {
    "tensor_parallel": (["cluster.mesh=[2]", "cluster.axes=[tensor]"], [*ZOO, *OTHERS]),
    "data_tensor": (["cluster.mesh=[2,2]"], ["llama", "moe", "resnet"]),
    "class_parallel": (["cluster.mesh=[2,2]", *IN_PARTS], ["gpt", "bert", "resnet"]),
    "table_parallel": (["cluster.mesh=[4]"], ["dlrm"]),
    "expert_parallel": (["cluster.mesh=[4]"], ["moe", "hf/mixtral"]),
    "sequence_parallel": (
        ["cluster.mesh=[2,2]", "cluster.axes=[data,sequence]", "trainer.micro_batches=4"],
        ["gpt", "llama", "t5", "hf/llama"],
    ),
}

#: Those that are quick enough for every run.
QUICK = {("tensor_parallel", "llama"), ("expert_parallel", "moe")}


def _patterns() -> list[object]:
    found = []
    for preset, (_, models) in PATTERNS.items():
        for model in models:
            marks = [WITH_TRANSFORMERS] if model in OTHERS else []
            if (preset, model) not in QUICK:
                marks.append(pytest.mark.exhaustive)
            found.append(pytest.param(preset, model, marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "model"), _patterns())
def test_a_pattern_is_found_in_any_model_and_trains_like_one_device(
    preset: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = [f"model.{setting}" for setting in ZOO.get(model, "").split()]
    if model == "t5":
        small.append("data.context=16")

    mesh, _ = PATTERNS[preset]
    train([f"model={model}", f"planner=manual/{preset}", *mesh, *small], tmp_path, monkeypatch)

    assert deviation(capsys.readouterr().out) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_stages_of_a_pipeline_are_planned_by_default(
    micro_batches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = [f"model.{setting}" for setting in ZOO["gpt"].split()]
    pipe = ["cluster.mesh=[2,1,2]", f"trainer.micro_batches={micro_batches}"]

    train(["model=gpt", *pipe, *small], tmp_path, monkeypatch)

    assert deviation(capsys.readouterr().out) <= TOLERANCE
