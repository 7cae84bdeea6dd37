"""`sbp-train` on real processes: what it computes, what it prints, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkpoints import saved_states
from small_runs import DATA, SMALL, losses

from sbp_core.testing.signals import hears_signals

PIPELINE = ("planner=manual/pipeline", "cluster.axes=[pipe]", "trainer.micro_batches=2")

#: Evaluates averaged parameters behind every step, and has a callback that watches.
EVALUATING = (
    "trainer.evaluate.every=1",
    "trainer.update.ema_decay=0.9",
    "trainer.callbacks=[{name: early_stop, patience: 3}]",
)

MPIEXEC = ("mpiexec", "-n", "2", "--oversubscribe", "--bind-to", "none")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with one thread for each process."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `sbp-train`, by itself."""
    return started([sys.executable, "-m", "sbp_launch.apps.train", *SMALL, *overrides], folder)


def test_ranks_of_a_pipeline_take_their_own_parts_of_a_batch(tmp_path: Path) -> None:
    done = train(tmp_path, *PIPELINE, "boxing=torch", f"hydra.run.dir={tmp_path}/run")

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "between"),
    [
        pytest.param(DATA, ("torch",), id="sharded"),
        pytest.param(DATA, ("mpi",), id="sharded-mpi", marks=pytest.mark.exhaustive),
        pytest.param(PIPELINE, ("torch",), id="pipeline"),
        pytest.param(PIPELINE, ("mpi",), id="pipeline-mpi", marks=pytest.mark.exhaustive),
    ],
)
def test_processes_compute_what_threads_do_bit_for_bit(
    tmp_path: Path, layout: tuple[str, ...], between: tuple[str, ...]
) -> None:
    runs = {}
    for boxing in ("local", *between):
        where = tmp_path / boxing
        saving = ("trainer.checkpoint.every=1", "trainer.checkpoint.keep=0")
        overrides = (*layout, *saving, *EVALUATING, f"boxing={boxing}", f"hydra.run.dir={where}")
        done = train(tmp_path, *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        runs[boxing] = done.stdout
        if boxing != "local":
            assert "launcher spawn: 2 processes, one a rank" in done.stdout
            assert (where / "logs" / "rank_1.txt").read_text("utf-8")
    assert len(losses(tmp_path / "local")) == 3
    for boxing in between:
        assert losses(tmp_path / boxing) == losses(tmp_path / "local")
        held_out = [losses(tmp_path / one, "held_out_loss") for one in (boxing, "local")]
        assert held_out[0] == held_out[1] and len(set(held_out[0])) == 3
        for step in (1, 2, 3):  # those of 1 and 2 were written while the run went on
            found, states = (
                saved_states(tmp_path / one / "checkpoints" / f"step-{step:08d}")
                for one in (boxing, "local")
            )
            assert found.keys() == states.keys()
            assert all(found[name].equal(value) for name, value in states.items())
        # What rank 0 prints of losses, held-out loss, sample and deviation.
        own, other = (runs[name].partition("step 1/3")[2] for name in ("local", boxing))
        told = [line for line in own.splitlines() if "held-out" in line or "deviation" in line]
        assert told and all(line in other for line in told)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("by", "boxing"),
    [("spawn", "torch"), ("torchrun", "torch"), ("mpiexec", "torch"), ("mpiexec", "mpi")],
)
def test_a_sweep_has_a_run_on_processes_after_the_other_also_behind_one_that_fails(
    tmp_path: Path, by: str, boxing: str
) -> None:
    command = ("-m", "sbp_launch.apps.train", *SMALL, *DATA, f"boxing={boxing}")
    command += ("-m", "optimizer.lr=1e-3,1e12,1e-2", "hydra.sweep.dir=sweep")
    command += ("trainer.plan_rows=0", "trainer.compare_steps=0")
    starts = {"spawn": [sys.executable], "torchrun": TORCHRUN}.get(by, [*MPIEXEC, sys.executable])

    # mpiexec gives its ranks a terminal, which is to show plain text.
    done = started([*starts, *command], tmp_path, {**AS_ROOT, "TERM": "dumb"})

    assert done.returncode == 1, done.stdout + done.stderr  # one of them has diverged
    first, second = (losses(tmp_path / "sweep" / job) for job in "02")
    assert first[0] == second[0] and first[2] != second[2]
    for job in "012":
        assert (tmp_path / "sweep" / job / "logs" / "rank_1.txt").exists()
    head, _, *rows = done.stdout.partition("the runs of sweep:\n")[2].splitlines()
    assert head.split()[:3] == ["run", "optimizer.lr", "steps"]
    assert [row.split()[2] for row in (rows[0], rows[2])] == ["3", "3"]
    assert rows[3].startswith("run 1 failed: the loss is nan; the last finite loss was ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "boxing"),
    [
        (signal.SIGTERM, 143, "torch"),
        pytest.param(signal.SIGINT, 130, "torch", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, 143, "mpi", marks=pytest.mark.exhaustive),
    ],
)
@hears_signals()
def test_ranks_that_are_asked_to_stop_do_so_behind_one_step_and_save_it(
    tmp_path: Path, number: int, code: int, boxing: str
) -> None:
    overrides = [*SMALL, *DATA, f"boxing={boxing}", "hydra.run.dir=run", "trainer.compare_steps=0"]
    overrides[overrides.index("trainer.steps=3")] = "trainer.steps=1000000"
    command = [sys.executable, "-u", "-m", "sbp_launch.apps.train", *overrides]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        told = text_until(run, b"step 3/")
        run.send_signal(number)
        told += run.communicate(timeout=240)[0].decode()

    assert run.returncode == code, told
    assert "the states so far are in checkpoints/step-" in told
    assert "Traceback" not in told
    steps = saved_states(tmp_path / "run")["head.weight.step"].item()
    assert steps == len(losses(tmp_path / "run"))


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_is_named_with_its_log(tmp_path: Path) -> None:
    overrides = [*SMALL, *DATA, "boxing=torch", "hydra.run.dir=run", "trainer.steps=1000000"]
    overrides.remove("trainer.steps=3")
    command = [sys.executable, "-u", "-m", "sbp_launch.apps.train", *overrides]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        told = text_until(run, b"step 3/")
        os.kill(process_of_rank(1, tmp_path), signal.SIGKILL)
        told += run.communicate(timeout=240)[0].decode()

    assert run.returncode == 1, told
    assert "rank 1 was ended by SIGKILL" in told
    assert "run/logs/rank_1.txt, which ends with:" in told
    assert "step 2/1000000" in told.rpartition("which ends with:")[2]


def text_until(run: subprocess.Popen[bytes], text: bytes) -> str:
    """Return what a run has written when it has written a text."""
    assert run.stdout is not None, "it was asked for"
    told = b""
    while text not in told and (new := os.read(run.stdout.fileno(), 2**16)):
        told += new
    return told.decode()


def process_of_rank(rank: int, folder: Path) -> int:
    """Return the process of a rank of the run below a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        named = {f"{name}={rank}".encode() for name in ("RANK", "OMPI_COMM_WORLD_RANK")}
        if bytes(folder / "run") in command and named & {*variables}:
            return int(process.name)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("boxing", ["torch", "mpi"])
@pytest.mark.parametrize("by", ["torchrun", "mpiexec"])
def test_the_command_runs_under_other_launchers(tmp_path: Path, by: str, boxing: str) -> None:
    overrides = (*SMALL, *DATA, f"boxing={boxing}", "hydra.run.dir=run")
    starts = TORCHRUN if by == "torchrun" else MPIEXEC
    command = ("-m", "sbp_launch.apps.train", *overrides)
    if by == "mpiexec":
        command = (sys.executable, *command)

    done = started([*starts, *command], tmp_path, AS_ROOT)

    if (by, boxing) == ("torchrun", "mpi"):  # its processes have no MPI that connects them
        assert done.returncode != 0
        assert "the run has ranks [0, 1], but 1 processes were started" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "run")) == 3
    assert done.stdout.count("step 3/3") == 1  # rank 0 alone speaks
    assert (tmp_path / "run" / "logs" / "rank_1.txt").exists()


@pytest.mark.exhaustive
def test_a_launcher_that_started_too_many_is_told_so_once(tmp_path: Path) -> None:
    command = [*TORCHRUN, "-m", "sbp_launch.apps.train", *SMALL, *DATA, "boxing=torch"]
    command[command.index("cluster.mesh=[2]")] = "cluster.mesh=[4]"

    done = started(command, tmp_path)

    assert done.returncode != 0
    assert done.stderr.count("torchrun has started 2 processes, and cluster.mesh=[4] has 4") == 1
    assert "--nproc-per-node=4" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.exhaustive
def test_help_under_a_launcher_is_printed_once(tmp_path: Path) -> None:
    done = started([*TORCHRUN, "-m", "sbp_launch.apps.train", "--help", "launcher=slurm"], tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("launcher.timeout_min") == 1


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
def test_slurm_jobs_are_submitted_here_to_this_machine(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        *DATA,
        "boxing=torch",
        "launcher=slurm",
        "launcher.cluster=local",
        "hydra.run.dir=run",
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "run")) == 3
    assert "step 3/3" in done.stdout
    assert list((tmp_path / "run" / "logs" / "slurm").glob("*_log.out"))


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
def test_a_job_whose_time_is_almost_up_saves_and_stops(tmp_path: Path) -> None:
    settings = (
        *(setting for setting in SMALL if not setting.startswith("trainer.steps")),
        *DATA,
        "boxing=torch",
        "launcher=slurm",
        "launcher.cluster=local",
        "launcher.timeout_min=2",
        "trainer.steps=1000000",
        "hydra.run.dir=run",
    )

    done = started([sys.executable, "-m", "sbp_launch.apps.train", *settings], tmp_path)

    assert "stopped by SIGUSR1; the states so far are in checkpoints/step-" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "failed: exit code 138" in done.stdout
