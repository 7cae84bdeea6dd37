from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sbp_core.errors import SbpValueError  # noqa: E402 - after the check that torch is there
from sbp_core.testing.signals import hears_signals  # noqa: E402
from sbp_torch.signatures.isolate import (  # noqa: E402
    Completed,
    Crash,
    Raised,
    Timeout,
    iter_isolated,
    run_isolated,
)


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[int]:
    """Return the processes that this one has started and not yet waited for.

    But for Python's own tracker of what spawned processes share, which other tests start.
    """
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            is_tracker = b"resource_tracker" in (folder / "cmdline").read_bytes()
            if int(parent) == os.getpid() and not is_tracker:
                found.add(int(folder.name))
    return found


def assert_no_child_is_left() -> None:
    assert children() == set()


def test_results_come_back_in_order() -> None:
    trials = [partial(pow, 2, exponent) for exponent in range(5)]

    assert run_isolated(trials, timeout_s=30) == [Completed(2**exponent) for exponent in range(5)]
    assert_no_child_is_left()


def test_no_trial_needs_no_worker() -> None:
    assert run_isolated([], timeout_s=30) == []


def test_one_worker_runs_them_all_if_none_dies() -> None:
    pids = {verdict.value for verdict in run_isolated([os.getpid] * 4, timeout_s=30)}

    assert len(pids) == 1
    assert os.getpid() not in pids


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGKILL])
def test_a_crash_is_the_verdict_of_its_trial_only(number: signal.Signals) -> None:
    trials: list[Callable[[], object]] = [lambda: 1, partial(die, number), lambda: 3]

    before, crash, after = run_isolated(trials, timeout_s=30)

    assert (before, after) == (Completed(1), Completed(3))
    assert crash == Crash(-number)
    assert str(crash) == f"was killed by {number.name}"


def test_leaving_the_process_is_a_crash() -> None:
    verdict, after = run_isolated([partial(os._exit, 3), partial(int, 1)], timeout_s=30)

    assert str(verdict) == "ended its process with exit code 3"
    assert after == Completed(1)


@pytest.mark.slow
def test_a_trial_that_takes_too_long_is_ended() -> None:
    sleeping, after = run_isolated([partial(time.sleep, 600), partial(int, 1)], timeout_s=1.5)

    assert (sleeping, after) == (Timeout(1.5), Completed(1))
    assert_no_child_is_left()


@pytest.mark.slow
def test_the_time_limit_is_that_of_one_trial() -> None:
    verdicts = run_isolated([partial(time.sleep, 0.5)] * 4, timeout_s=1.9)

    assert verdicts == [Completed(None)] * 4


def test_an_exception_is_a_verdict() -> None:
    verdict, after = run_isolated([partial(int, "seven"), partial(int, 7)], timeout_s=30)

    assert verdict == Raised("ValueError", "invalid literal for int() with base 10: 'seven'")
    assert after == Completed(7)


def test_a_result_that_does_not_pickle_is_a_verdict() -> None:
    (verdict,) = run_isolated([lambda: lambda: 1], timeout_s=30)

    assert isinstance(verdict, Raised)


def test_large_results_come_through_the_pipe() -> None:
    (verdict,) = run_isolated([partial(bytes, 3_000_000)], timeout_s=30)

    assert verdict == Completed(bytes(3_000_000))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux only")
def test_a_trial_that_wants_too_much_memory_fails() -> None:
    (verdict,) = run_isolated([partial(bytes, 1 << 30)], timeout_s=30, memory_bytes=256 << 20)

    assert verdict == Raised("MemoryError", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_stays_open() -> None:
    run_isolated([os.getpid], timeout_s=30)
    before = num_open()

    run_isolated([partial(die, signal.SIGKILL)] * 3, timeout_s=30)

    assert num_open() == before


def test_a_worker_neither_prints_nor_runs_what_its_parent_does_at_exit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    atexit.register(mark.touch)
    try:
        run_isolated(
            [partial(print, "noise"), partial(os.write, 2, b"noise"), partial(die, 11), sys.exit],
            timeout_s=30,
        )
    finally:
        atexit.unregister(mark.touch)

    assert not mark.exists()
    assert capfd.readouterr() == ("", "")


def test_giving_up_ends_the_worker() -> None:
    verdicts = iter_isolated([os.getpid, partial(time.sleep, 600)], timeout_s=60)
    first = next(verdicts)
    assert isinstance(first, Completed)

    verdicts.close()

    with pytest.raises(ProcessLookupError):
        os.kill(first.value, 0)


@hears_signals()
def test_an_interrupt_of_the_parent_ends_the_worker() -> None:
    trials: list[Callable[[], object]] = [partial(os.kill, os.getpid(), signal.SIGINT)]

    with pytest.raises(KeyboardInterrupt):
        run_isolated([*trials, partial(time.sleep, 600)], timeout_s=60)

    assert_no_child_is_left()


@hears_signals()
def test_an_interrupt_within_the_fork_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork

    def interrupted_fork() -> int:
        pid = fork()
        if pid:  # where Python runs what modules registered for a fork
            with suppress(KeyboardInterrupt):  # as Python does there
                signal.raise_signal(signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", interrupted_fork)

    with pytest.raises(KeyboardInterrupt):
        run_isolated([partial(time.sleep, 600)], timeout_s=60)

    assert_no_child_is_left()


def test_kernels_run_on_one_thread_after_the_parent_used_many() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(300, 300)
        expected = float((x @ x).sum())

        verdicts = run_isolated([torch.get_num_threads, lambda: float((x @ x).sum())], timeout_s=60)
    finally:
        torch.set_num_threads(threads)

    assert verdicts[0] == Completed(1)
    assert isinstance(verdicts[1], Completed)
    assert verdicts[1].value == pytest.approx(expected, rel=1e-3)


def test_a_time_limit_has_to_be_positive() -> None:
    with pytest.raises(SbpValueError, match="time limit"):
        run_isolated([os.getpid], timeout_s=0)
