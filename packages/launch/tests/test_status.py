"""SIGUSR1 and SIGUSR2 have a run write what it is at, whatever its main thread does."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sbp_core.testing.signals import hears_signals
from sbp_launch.run.status import StatusSignal, ignore_status_signals, status_signals
from sbp_launch.run.stopping import StopSignals
from sbp_launch.world import World

WORLD = World(rank=1, size=2, local_rank=1, local_size=2)


def session_that(status: Callable[[], Sequence[str]]) -> Any:
    return SimpleNamespace(status=status)


def text_of(asked: StatusSignal, until: str) -> str:
    """Return what was written, once it holds a text."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        text = asked.path.read_text("utf-8") if asked.path.exists() else ""
        if until in text:
            return text
        time.sleep(0.01)
    raise AssertionError(f"no {until!r} in {asked.path}")


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SUBMITIT_EXECUTOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@hears_signals()
def test_what_the_ranks_are_at_is_written_as_often_as_it_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    said = iter([["rank 1: at head", "  registers:", "    a register"], ["rank 1: at tail"]])
    before = signal.getsignal(number)
    with StatusSignal(tmp_path / "logs", WORLD) as asked:
        asked.session = session_that(lambda: next(said))
        signal.raise_signal(number)
        text_of(asked, "at head")
        signal.raise_signal(number)
        text = text_of(asked, "at tail")

    assert asked.path == tmp_path / "logs" / "status_1.txt"
    assert " process 1 of 2: host " in text.splitlines()[0]
    assert text.index("at head") < text.index("stacks:") < text.index("at tail")
    assert "test_status.py" in text  # where the main thread is
    told = capfd.readouterr().err
    assert f"sbp-train: the state of its ranks: {asked.path}\nsbp-train: rank 1: at head\n" in told
    assert "  registers:\n    a register\n" in text and "register" not in told
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SUBMITIT_EXECUTOR"])
@hears_signals()
def test_in_a_job_of_slurm_sigusr1_stops_a_run_and_sigusr2_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    assert status_signals() == (signal.SIGUSR1, signal.SIGUSR2)
    monkeypatch.setenv(variable, "7")

    with StopSignals() as signals, StatusSignal(tmp_path / "logs", WORLD) as asked:
        with signals.training():
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        text_of(asked, "stacks:")

    assert status_signals() == (signal.SIGUSR2,)
    assert signals.pending_number == signal.SIGUSR1
    assert asked.path.read_text("utf-8").count("stacks:") == 1


@hears_signals()
def test_outside_of_slurm_sigusr1_does_not_stop_a_run(tmp_path: Path) -> None:
    with StatusSignal(tmp_path, WORLD) as asked, StopSignals() as signals, signals.training():
        signal.raise_signal(signal.SIGUSR1)
        text_of(asked, "stacks:")
        signals.stop_if_asked()

    assert signals.pending_number == 0


@hears_signals()
def test_it_is_written_while_the_main_thread_is_in_a_call_that_does_not_return(
    tmp_path: Path,
) -> None:
    out, into = os.pipe()
    written = []

    def ask(asked: StatusSignal) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        written.append(text_of(asked, "rank 1: waits"))
        os.write(into, b"!")

    with StatusSignal(tmp_path, WORLD) as asked:
        asked.session = session_that(lambda: ["rank 1: waits"])
        asking = threading.Timer(0.1, ask, (asked,))
        asking.start()
        read = ctypes.CDLL(None).read(out, ctypes.create_string_buffer(1), 1)
        asking.join()

    assert written and read == 1
    os.close(out), os.close(into)


@hears_signals()
def test_a_status_that_cannot_be_written_stops_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked_times = []

    def fail() -> Sequence[str]:
        asked_times.append(1)
        raise RuntimeError("it changed while it was read")

    with StatusSignal(tmp_path, WORLD) as asked:
        asked.session = session_that(fail)
        signal.raise_signal(signal.SIGUSR2)
        while not asked_times:
            time.sleep(0.01)
        asked.session = None
        signal.raise_signal(signal.SIGUSR2)
        text_of(asked, "no session is open now")

    assert "cannot be written: it changed while it was read" in capfd.readouterr().err


@hears_signals()
def test_other_signals_write_nothing_and_what_was_heard_before_is_heard_behind(
    tmp_path: Path,
) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    hangup = signal.signal(signal.SIGHUP, lambda number, frame: heard.append(number))
    try:
        with StatusSignal(tmp_path / "logs", WORLD) as asked:
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
        signal.signal(signal.SIGHUP, hangup)

    assert heard == [signal.SIGHUP, signal.SIGUSR2]
    assert not asked.path.exists()
    assert signal.set_wakeup_fd(-1) == -1


@hears_signals()
def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with StatusSignal(tmp_path / "logs", WORLD):
            assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.slow(but=1)
@hears_signals()
@pytest.mark.parametrize(
    ("module", "inner"), [("apps.train", "_run"), ("launching.rank", "run_rank")]
)
def test_a_process_outlives_the_signal_before_its_ranks_have_begun(module: str, inner: str) -> None:
    program = (
        f"import os, signal, sys\n"
        f"from sbp_launch.{module} import main\n"
        f"module = sys.modules['sbp_launch.{module}']\n"
        f"module.{inner} = lambda *_: os.kill(os.getpid(), signal.SIGUSR2) or 7\n"
        f"sys.argv[1:] = ['runs/first', '80']\n"
        f"main()\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 7, done.stderr
    assert "no status is available now" in done.stderr


@hears_signals()
def test_what_hears_or_ignores_the_signal_already_still_does() -> None:
    def heard(number: int, frame: object) -> None:
        """Hear it."""

    for handler in (signal.SIG_IGN, heard):
        before = signal.signal(signal.SIGUSR2, handler)
        try:
            ignore_status_signals()
            assert signal.getsignal(signal.SIGUSR2) == handler
        finally:
            signal.signal(signal.SIGUSR2, before)


def test_in_another_thread_than_the_main_one_nothing_is_heard(tmp_path: Path) -> None:
    found = []

    def enter() -> None:
        before = signal.getsignal(signal.SIGUSR2)
        with StatusSignal(tmp_path, WORLD):
            found.append(signal.getsignal(signal.SIGUSR2) == before)

    other = threading.Thread(target=enter)
    other.start()
    other.join()

    assert found == [True]
