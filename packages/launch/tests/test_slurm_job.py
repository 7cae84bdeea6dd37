"""What becomes of a submitted job, with a submitit that submits nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sbp_launch.launching import slurm_job
from sbp_launch.launching.slurm_job import SlurmJob, run_task

SETTINGS = {
    "num_ranks": 4,
    "nodes": 2,
    "cpus_per_rank": 3,
    "gpus_per_rank": 1,
    "timeout_min": 10,
    "partition": "fast",
    "parameters": {"slurm_account": "lab"},
    "cluster": "slurm",
}


class MadeUpJob:
    """A job that is over when it has been looked at twice; what its tasks returned, or raised."""

    job_id = "77"

    def __init__(self, folder: Path, outcomes: Sequence[int | Exception]) -> None:
        self.outcomes, self.num_tasks = outcomes, len(outcomes)
        self.output, self.looks, self.is_cancelled = folder / "output", 0, False

    def done(self) -> bool:
        self.looks += 1
        with self.output.open("a", encoding="utf-8") as file:
            file.write("step 1\nste" if self.looks == 1 else "p 2\nsubmitit INFO: over\n")
        return self.looks == 2

    def task(self, number: int) -> Any:
        def result() -> int:
            outcome = self.outcomes[number]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return SimpleNamespace(result=result, paths=SimpleNamespace(stdout=str(self.output)))

    def cancel(self, check: bool) -> None:
        self.is_cancelled = True


class MadeUpExecutor:
    """Keeps what was asked for."""

    asked: dict[str, Any]
    job: MadeUpJob

    def __init__(self, folder: Path, cluster: str) -> None:
        type(self).asked = {"folder": folder, "cluster": cluster}

    def update_parameters(self, **wanted: Any) -> None:
        self.asked.update(wanted)

    def submit(self, task: object, command: Sequence[str]) -> MadeUpJob:
        self.asked.update(task=task, command=command)
        return self.job


@pytest.fixture(autouse=True)
def submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = SimpleNamespace(AutoExecutor=MadeUpExecutor)
    monkeypatch.setattr(slurm_job, "_submitit", lambda: made_up)
    monkeypatch.setattr(slurm_job, "_LOOK_S", 0.0)
    MadeUpExecutor.job = MadeUpJob(tmp_path, [0, 0, 0, 0])


def test_a_job_asks_for_what_the_settings_say(tmp_path: Path) -> None:
    SlurmJob(tmp_path, SETTINGS, ["train", "it"])

    asked = MadeUpExecutor.asked
    assert (asked["nodes"], asked["tasks_per_node"], asked["cpus_per_task"]) == (2, 2, 3)
    assert (asked["gpus_per_node"], asked["slurm_partition"]) == (2, "fast")
    assert (asked["slurm_account"], asked["timeout_min"]) == ("lab", 10)
    assert (asked["task"], asked["command"]) == (run_task, ("train", "it"))
    assert asked["folder"] == tmp_path / "logs" / "slurm"


def test_lines_of_rank_0_are_passed_on_whole_without_those_of_submitit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SlurmJob(tmp_path, SETTINGS, ["train"]).wait() == 0

    assert capsys.readouterr().out == "job 77 is submitted\nstep 1\nstep 2\n"


@pytest.mark.parametrize(
    ("outcomes", "code", "told"),
    [
        ([0, 3, 1], 3, ["1 of the job failed: exit code 3", "2 of the job failed: exit code 1"]),
        ([0, -9], 137, ["1 of the job failed: exit code -9"]),
        ([RuntimeError("of submitit\n\ncut off"), 0], 1, ["0 of the job failed: cut off"]),
    ],
)
def test_the_first_task_that_fails_gives_the_exit_code_and_all_are_named(
    outcomes: Sequence[int | Exception],
    code: int,
    told: Sequence[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    MadeUpExecutor.job = MadeUpJob(tmp_path, outcomes)

    assert SlurmJob(tmp_path, SETTINGS, ["train"]).wait() == code
    failures = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
    assert failures == [f"task {line}" for line in told]


def test_a_second_signal_cancels_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command))
    job = SlurmJob(tmp_path, SETTINGS, ["train"])

    job.stop(signal.SIGINT)
    assert asked == [["scancel", "--signal=TERM", "77"]]
    assert not MadeUpExecutor.job.is_cancelled
    job.stop(signal.SIGINT)
    assert MadeUpExecutor.job.is_cancelled and len(asked) == 1


def test_a_task_tells_its_rank_what_torchrun_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = {"hostnames": ["gpu1", "gpu2"], "num_nodes": 2, "num_tasks": 4, "job_id": "77"}
    place = SimpleNamespace(**hosts, global_rank=3, local_rank=1)
    made_up = SimpleNamespace(JobEnvironment=lambda: place)
    monkeypatch.setattr(slurm_job, "_submitit", lambda: made_up)
    heard: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: heard.append(number))
    monkeypatch.setenv("SLURM_PROCID", "3")
    program = (
        "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w')); sys.exit(5)"
    )

    code = run_task([sys.executable, "-c", program, str(tmp_path / "variables")])

    found = json.loads((tmp_path / "variables").read_text("utf-8"))
    assert code == 5
    assert (found["RANK"], found["WORLD_SIZE"]) == ("3", "4")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert found["MASTER_ADDR"] == "gpu1" and found["SLURM_PROCID"] == ""
    assert set(heard) == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
