"""The commands as users type them: they train, plan, explain, and refuse what cannot be meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkpoints import saved_states

from forked import run_command
from sbp_core.compile import PLAN

SMALL = (
    "model.num_layers=2",
    "model.hidden=32",
    "model.num_heads=4",
    "model.context=32",
    "trainer.steps=4",
    "trainer.batch_size=8",
    "trainer.evaluate.batches=2",
    "trainer.sample_tokens=8",
    "trainer.log_every=2",
)

WAYS = {
    "data x tensor": (),
    "tensor": ("planner=manual/tensor_parallel", "cluster.mesh=[1,2]"),
    "data": ("planner=manual/data_parallel", "cluster.mesh=[4,1]"),
    "sharded": ("planner=manual/zero", "cluster.mesh=[4]", "cluster.axes=[data]"),
    "pipeline": (
        "planner=manual/pipeline",
        "cluster.mesh=[2]",
        "cluster.axes=[pipe]",
        "trainer.micro_batches=4",
        "trainer.trace=3..4",
    ),
    "osdp": (
        "planner=osdp",
        "planner.memory_bytes=2.2e6",
        "cluster.mesh=[4]",
        "cluster.axes=[data]",
    ),
    "lock-step": ("runtime=reference",),
    "own text": ("data=text", f"data.path={Path(__file__).parent}"),
}


def sbp(command: str, folder: Path, *overrides: str) -> tuple[int, str]:
    """Run a command of sbp_launch in a folder; return its exit code and what it printed."""
    return run_command([f"sbp_launch.apps.{command}", *overrides], folder)


def check_trace(printed: str, folder: Path) -> None:
    """Check that a run left a trace with each firing of its plan, and said where the time went."""
    plan = PLAN.read(folder / "plan.json")
    events = json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    for part in plan.ranks:
        firings = [one for order in part.orders.values() for one in order]
        own = [event for event in events if event["pid"] == part.rank]
        found = [
            (event["args"]["step"], event["args"]["actor"], event["args"]["micro_batch"])
            for event in own
            if event.get("cat") in ("compute", "boxing")
        ]
        assert sorted(found) == sorted((step, *one) for step in (3, 4) for one in firings)
        held = [event["args"]["bytes"] for event in own if event["ph"] == "C"]
        assert len(held) == len(found)
        assert min(held) > 0
    assert "where the time of a step went (mean of steps 3-4)" in printed
    assert "trace of these steps: trace.json" in printed


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.replace(" ", "-"))
def test_it_trains_and_says_how_far_it_is_from_one_device(tmp_path: Path, way: str) -> None:
    code, printed = sbp("train", tmp_path, *SMALL, *WAYS[way])

    assert code == 0, printed
    assert "a rank sends" in printed
    assert "cannot deadlock" in printed
    assert "step 4/4" in printed
    assert re.search(r"a step took .* \(median of steps 3-4\); predicted ", printed)
    # What is predicted of memory and bytes is what is measured, to the last digit that is printed.
    # Only what a stage that runs ahead holds depends on the timing, and the most is predicted.
    found = re.findall(r"(held at most|sent) (\S+) (\S+).*; predicted (\S+) (\S+)", printed)
    assert [of for of, *_ in found] == ["held at most", "sent"][: 1 if way == "lock-step" else 2]
    for of, measured, unit, predicted, predicted_unit in found:
        assert unit == predicted_unit
        if way == "pipeline" and of == "held at most":
            assert 0.95 * float(predicted) < float(measured) <= float(predicted)
        else:
            assert measured == predicted
    assert re.search(r"held-out loss: \d\.\d+", printed)
    assert "a sample of text" in printed
    if "trainer.trace=3..4" in WAYS[way]:
        check_trace(printed, next(tmp_path.glob("runs/*")))
    deviation = re.search(r"first 3 steps: \S+ \((\S+) relative\)", printed)
    assert deviation is not None
    assert float(deviation[1]) < 1e-5


@pytest.mark.slow
def test_a_run_leaves_its_plan_metrics_and_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "what nobody else may know")
    code, printed = sbp("train", tmp_path, *SMALL)

    assert code == 0, printed
    (folder,) = (tmp_path / "runs").iterdir()
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert json.loads((folder / "plan.json").read_text("utf-8"))["planner"] == "propagate"
    assert (folder / "plan.txt").read_text("utf-8").count("\n") > 100
    states = saved_states(folder)
    assert states["head.weight"].shape == (256, 32)
    assert states["head.weight.step"].item() == 4
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert b"SERVICE_TOKEN" not in path.read_bytes(), path
        assert b"what nobody else may know" not in path.read_bytes(), path


@pytest.mark.slow
def test_a_plan_is_printed_without_training(tmp_path: Path) -> None:
    osdp = ("planner=osdp", "cluster.mesh=[4]", "cluster.axes=[data]")
    code, printed = sbp("plan", tmp_path, *SMALL, *osdp)

    assert code == 0, printed
    assert re.search("all-reduce of .* over data", printed)
    assert "step 1/4" not in printed


def test_threads_are_refused_beside_a_backend_of_processes_before_anything_starts(
    tmp_path: Path,
) -> None:
    code, printed = sbp("train", tmp_path, *SMALL, "boxing=torch", "launcher=threads")

    assert code == 2
    assert "launcher=spawn" in printed
    assert "boxing=torch" in printed
    assert "local" in printed
    assert "Traceback" not in printed
