"""Runs that stop and go on, as users start them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import saved_states
from safetensors.torch import load_file
from small_runs import DATA, SMALL, losses
from test_launchers import TORCHRUN, started, text_until, train
from torch import Tensor

from forked import COMMANDS, run_command
from sbp_launch.checkpoint import open_checkpoint

QUIET = ("trainer.compare_steps=0", "trainer.plan_rows=0")


def without(*keys: str) -> tuple[str, ...]:
    """Return the settings of a small run but for some."""
    return tuple(text for text in SMALL if text.partition("=")[0] not in keys)


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-u", "-m", "sbp_launch.apps.train", *overrides]


def assert_equal(states: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert states.keys() == wanted.keys() and wanted
    assert all(torch.equal(states[name], value) for name, value in wanted.items())


@pytest.mark.slow
def test_processes_go_on_where_they_stopped_bit_for_bit(tmp_path: Path) -> None:
    layout = (*DATA, "boxing=torch", *QUIET)
    often = ("trainer.checkpoint.every=2", "trainer.checkpoint.keep=0")
    whole = train(tmp_path, *layout, *often, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    stopped = "trainer.resume=whole/checkpoints/step-00000002"

    rest = train(tmp_path, *layout, stopped, "hydra.run.dir=rest")

    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "continuing after step 2, from whole/checkpoints/step-00000002" in rest.stdout
    names = {path.name for path in (tmp_path / "rest/checkpoints/step-00000003").iterdir()}
    assert names == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    assert_equal(saved_states(tmp_path / "rest"), saved_states(tmp_path / "whole"))


@pytest.mark.exhaustive
def test_processes_start_from_weights_each_with_its_own_part(tmp_path: Path) -> None:
    one_step = (*without("trainer.steps", "trainer.evaluate.batches"), *DATA, *QUIET)
    one_step = (*one_step, "trainer.steps=1", "trainer.evaluate.batches=0", "boxing=torch")
    first = started(command(*one_step, "trainer.seed=7", "hydra.run.dir=first"), tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    convert = [COMMANDS["sbp-checkpoint"], "convert", "first", "first.safetensors"]
    assert run_command(convert, tmp_path)[0] == 0

    stays = ("trainer.init_from=first.safetensors", "optimizer.lr=1e-30", "hydra.run.dir=second")
    run = started(command(*one_step, *stays), tmp_path)

    assert run.returncode == 0, run.stdout + run.stderr
    found = saved_states(tmp_path / "second")
    files = {path.name for path in (tmp_path / "second/checkpoints/step-00000001").iterdir()}
    assert files == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    for name, value in load_file(tmp_path / "first.safetensors").items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-29)


@pytest.mark.exhaustive
@pytest.mark.parametrize("boxing", ["local", "torch"])
def test_a_hundred_steps_are_fifty_a_stop_and_fifty(tmp_path: Path, boxing: str) -> None:
    overrides = (
        *without("trainer.steps", "trainer.log_every"),
        *QUIET,
        *DATA,
        f"boxing={boxing}",
        "trainer.steps=100",
        "trainer.log_every=25",
        "trainer.schedule.decay=cosine",
        "trainer.schedule.warmup_steps=10",
        "trainer.update.clip_norm=1.0",
        "trainer.update.ema_decay=0.9",
    )
    for stops in (False, True):
        folder = f"hydra.run.dir={'run' if stops else 'whole'}"
        with subprocess.Popen(
            command(*overrides, folder, "trainer.resume=auto"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as run:
            told = text_until(run, b"step 50/100" if stops else b"step 100/100")
            if stops:
                run.send_signal(signal.SIGTERM)
            told += run.communicate(timeout=240)[0].decode()
        assert run.returncode == (143 if stops else 0), told
    stopped = saved_states(tmp_path / "run")["head.weight.step"].item()
    assert 50 <= stopped < 100

    done = subprocess.run(
        command(*overrides, "hydra.run.dir=run", "trainer.resume=auto"),
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"continuing after step {stopped:.0f}" in done.stdout
    assert_equal(saved_states(tmp_path / "run"), saved_states(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize("planner", ["zero", "data_parallel"])
def test_torchrun_starts_a_run_again_that_has_lost_a_rank(tmp_path: Path, planner: str) -> None:
    overrides = (
        *without("trainer.steps", "trainer.log_every"),
        *QUIET,
        f"planner=manual/{planner}",
        "cluster.axes=[data]",
        "boxing=torch",
        "trainer.steps=300",
        "trainer.log_every=50",
        "trainer.checkpoint.every=20",
    )
    again = (*TORCHRUN, "--max-restarts=1", "-m", "sbp_launch.apps.train", *overrides)
    with subprocess.Popen(
        [*again, "hydra.run.dir=run", "trainer.resume=auto"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as run:
        told = text_until(run, b"step 100/300")
        os.kill(process_of_torchrun(1, tmp_path), signal.SIGKILL)
        told += run.communicate(timeout=240)[0].decode()

    assert run.returncode == 0, told
    begun = int(told.partition("continuing after step ")[2].partition(",")[0])
    assert 80 <= begun < 300
    if planner == "data_parallel":  # the other rank has all states, and saves them
        assert f"the states so far are in checkpoints/step-{begun:08d}" in told
        assert begun >= 100
    else:
        assert "the states are not saved: rank 1 alone held a part of" in " ".join(told.split())
        assert begun % 20 == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [
        *range(1, 301)
    ]
    whole = train_whole(tmp_path, overrides)
    assert_equal(saved_states(tmp_path / "run"), whole)
    assert samples(tmp_path / "run") == samples(tmp_path / "whole")


@pytest.mark.exhaustive
def test_a_host_less_is_planned_anew_and_goes_on_where_the_others_stopped(tmp_path: Path) -> None:
    overrides = (
        *without("trainer.steps", "trainer.log_every", "cluster.mesh"),
        *QUIET,
        "planner=manual/data_parallel",
        "cluster.mesh=[-1]",
        "cluster.axes=[data]",
        "boxing=torch",
        "trainer.steps=1000",
        "trainer.log_every=50",
        "trainer.checkpoint.every=20",
        "hydra.run.dir=run",
        "trainer.resume=auto",
    )
    settings = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=2"
    host = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
        *("--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        *("--local-addr=127.0.0.1", f"--rdzv-conf={settings}", "-m", "sbp_launch.apps.train"),
    )

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*host, *overrides],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    with start() as first:
        time.sleep(1.0)  # the first one has the store by which hosts meet
        with start() as second:
            told = text_until(first, b"step 100/1000")
            second.kill()
            os.kill(process_of_torchrun(1, tmp_path), signal.SIGKILL)
        told += first.communicate(timeout=240)[0].decode()

    assert first.returncode == 0, told
    assert told.count("planner manual: 2 ranks") == told.count("planner manual: 1 rank,") == 1
    saved = int(told.partition("the states so far are in checkpoints/step-")[2][:8])
    assert f"continuing after step {saved}, from checkpoints/step-{saved:08d}" in told
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [
        *range(1, 1001)
    ]
    assert saved >= 100
    alone = (*overrides[:-2], "hydra.run.dir=whole")
    alone = tuple("cluster.mesh=[1]" if text == "cluster.mesh=[-1]" else text for text in alone)
    subprocess.run(command(*alone), cwd=tmp_path, check=True, capture_output=True, timeout=240)
    # The first steps alike; later ones drift as float32 is summed in another order.
    assert losses(tmp_path / "run")[:20] == pytest.approx(losses(tmp_path / "whole")[:20], abs=1e-5)
    assert samples(tmp_path / "run") == samples(tmp_path / "whole")


def samples(folder: Path) -> object:
    """Return how far a run is in its data, by its newest checkpoint."""
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.manifest.metadata.cursor


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def train_whole(folder: Path, overrides: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the states of the run that nobody stops."""
    whole = command(*overrides, "hydra.run.dir=whole")
    subprocess.run(whole, cwd=folder, check=True, capture_output=True, timeout=240)
    return saved_states(folder / "whole")


def process_of_torchrun(rank: int, folder: Path) -> int:
    """Return the process of a rank that torchrun has started in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here = (process / "cwd").readlink() == folder
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if here and f"RANK={rank}".encode() in variables:
            return int(process.name)
    raise AssertionError(f"there is no rank {rank}")
