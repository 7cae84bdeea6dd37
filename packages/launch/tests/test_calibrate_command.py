"""`sbp-calibrate` as a command: what it prints and leaves, how it is refused and stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from sbp_core.calibration import Calibration, Measurement
from sbp_core.cluster import Cluster
from sbp_core.plugins import PluginRegistry
from sbp_core.testing.signals import hears_signals
from sbp_launch.calibrate import calibration_config
from sbp_launch.calibrate.calibration import call_table
from sbp_launch.calibrate.calibration_config import CALL_KINDS, check_calibrate
from sbp_launch.calibrate.measuring_rank import indexed_device
from sbp_launch.settings.config import ComposedConfig, PluginChoice


def calibrate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "sbp_launch.calibrate.command",
            "boxing=local",
            "runtime=reference",
            *arguments,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_the_command_writes_a_file_that_a_cluster_is_read_from(tmp_path: Path) -> None:
    quick = ("sizes=[1024,8192,65536]", "repetitions=3", "time_s=10")
    done = calibrate(tmp_path, *quick, "out=here.json")

    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "here.json")
    calibration = cluster.calibration
    assert calibration is not None
    assert len(calibration.samples) == 18
    assert {error.way for error in calibration.errors} == {"size", "group", "collective"}
    assert "reduce-scatter" in done.stdout
    assert "e+" not in done.stdout
    assert "left out by size: median" in done.stdout
    assert "sbp-plan cluster=measured cluster.file=here.json" in done.stdout
    assert "sbp-calibrate-progress" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


def test_a_process_measures_the_gpu_that_its_backend_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    assert indexed_device("cuda") == torch.device("cuda", 3)
    assert indexed_device("cuda:1") == torch.device("cuda", 1)
    assert indexed_device("cpu") == torch.device("cpu")


def test_a_backend_that_chooses_gpus_itself_is_measured_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = PluginChoice(name="theirs"), SimpleNamespace(device="auto")
    monkeypatch.setattr(calibration_config, "choose", lambda *arguments: chosen)
    composed = ComposedConfig(values={"boxing": {}, "ranks": 3}, files={}, overrides=())

    run = check_calibrate(composed, PluginRegistry())

    assert (run.device, run.settings.ranks) == ("cuda", 3)


@pytest.mark.slow
@hears_signals()
def test_ctrl_c_ends_it_without_a_word_of_the_ranks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sbp_launch.calibrate.command",
        "boxing=local",
        "runtime=reference",
        "sizes=[1024]",
    ]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.stdout is not None
    begun = run.stdout.readline()  # its processes are starting, and import torch
    time.sleep(1.0)

    run.send_signal(signal.SIGINT)
    rest, _ = run.communicate(timeout=240)

    # Shells show both as 130: Python ends itself by the signal where it came inside of an import
    # that runs code from C.
    assert run.returncode in (130, -signal.SIGINT), begun + rest
    assert "Traceback" not in rest
    assert rest.rstrip().endswith("sbp-calibrate: interrupted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_rank_measures_only_itself(tmp_path: Path) -> None:
    done = calibrate(tmp_path, "ranks=1", "time_s=4")

    assert done.returncode == 0, done.stderr
    assert "measuring boxing=local on 1 rank on this machine" in done.stdout
    assert '"cluster.mesh=[1]"' in done.stdout
    assert Cluster.load(tmp_path / "cluster.json").calibration is None


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_no_file_is_left(tmp_path: Path) -> None:
    done = calibrate(tmp_path, "sizes=[1024]", "deadline_s=1e-9")

    assert done.returncode == 1
    assert "sbp-calibrate: ranks 0-1 ended with exit code 1" in done.stderr
    assert "boxing step 'calibrate-" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "cluster.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rank=4"], ["'rank'", "did you mean 'ranks'?"]),
        (["+rank=4"], ["'rank'", "did you mean 'ranks'?"]),
        (["ranks=two"], ["ranks", "an integer", "sbp_launch/conf/calibrate.yaml"]),
        (["kinds=[gather]"], ["gather", "all-gather"]),
        (["boxing.depth=1"], ["boxing.depth"]),
        (["out=old.json"], ["no cluster file", "old.json", "overwrite=true"]),
    ],
)
def test_a_wrong_setting_of_the_command_has_exit_code_2(
    tmp_path: Path, arguments: list[str], says: list[str]
) -> None:
    (tmp_path / "old.json").write_text("{}")

    done = calibrate(tmp_path, *arguments)

    assert done.returncode == 2, done.stderr
    assert [text for text in says if text not in done.stderr] == []
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_help_shows_the_backends_and_runtimes_and_no_other_groups(tmp_path: Path) -> None:
    done = calibrate(tmp_path, "--help")

    assert done.returncode == 0
    assert "  boxing\n    * local" in done.stdout
    assert "  runtime\n" in done.stdout
    assert "optimizer" not in done.stdout
    assert "  time_s=120.0                      seconds to measure;" in done.stdout


def test_the_table_fits_into_80_columns() -> None:
    long_names = [
        Measurement(
            backend="torch",
            kind=kind,
            group_size=2,
            concurrent_groups=1,
            shared_bytes=size,
            times_s=(1.234e-4 + size / 0.8123e9,),
        )
        for kind in CALL_KINDS
        for size in (1024, 268_435_456)
    ]
    console = Console(width=80, record=True, file=StringIO())

    console.print(call_table(Calibration.of(long_names), ()))

    shown = console.export_text()
    assert "…" not in shown
    assert "268.4 MB" in shown
