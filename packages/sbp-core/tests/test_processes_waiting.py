"""Waiting by looking; a call that may be abandoned, and what becomes of it once nobody waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from sbp_core.errors import BoxingError
from sbp_core.processes import waiting
from sbp_core.processes.waiting import run_abandonable, wait_until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is, alone: it goes on while somebody sleeps."""
    now = [100.0]

    def sleep(pause_s: float) -> None:
        now[0] += pause_s

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


def test_waiting_looks_once_even_without_time_and_ends_when_it_is_done() -> None:
    looks: list[int] = []

    def third_time() -> bool:
        looks.append(len(looks))
        return len(looks) == 3

    assert wait_until(lambda: True, 0.0, first_pause_s=1.0, longest_pause_s=1.0)
    assert wait_until(third_time, 10.0, first_pause_s=1e-4, longest_pause_s=1e-3)
    assert looks == [0, 1, 2]


def test_waiting_in_vain_takes_its_time_and_says_no(clock: list[float]) -> None:
    assert not wait_until(lambda: False, 0.05, first_pause_s=1e-3, longest_pause_s=0.01)

    assert 100.05 <= clock[0] <= 100.06


def test_waiting_passes_on_what_the_look_raises() -> None:
    def look() -> bool:
        raise BoxingError("no hope")

    with pytest.raises(BoxingError, match="no hope"):
        wait_until(look, 10.0, first_pause_s=1e-3, longest_pause_s=1e-3)


def no_check() -> None:
    """There is hope."""


def test_it_returns_what_the_function_returns_or_raises_what_it_raises() -> None:
    def fail() -> None:
        raise KeyError("unknown")

    assert run_abandonable(lambda: 5, thread_name="x", check=no_check, look_s=0.01) == 5
    with pytest.raises(KeyError, match="unknown"):
        run_abandonable(fail, thread_name="x", check=no_check, look_s=0.01)


def test_a_call_whose_check_fails_is_abandoned_and_its_result_discarded() -> None:
    goes_on, discarded = threading.Event(), threading.Event()
    results: list[str] = []

    def connect() -> str:
        goes_on.wait(30.0)
        return "channel"

    def discard(result: str) -> None:
        results.append(result)
        discarded.set()

    def check() -> None:
        raise ValueError("rank 1 has ended")

    with pytest.raises(ValueError, match="rank 1 has ended"):
        run_abandonable(connect, thread_name="x", check=check, look_s=0.01, discard=discard)
    assert not results
    goes_on.set()

    assert discarded.wait(30.0)
    assert results == ["channel"]


def test_a_call_that_takes_too_long_is_abandoned() -> None:
    goes_on = threading.Event()

    with pytest.raises(TimeoutError, match=r"sbp-connect took longer than 0\.05 s"):
        run_abandonable(
            lambda: goes_on.wait(600.0),
            thread_name="sbp-connect",
            check=no_check,
            look_s=600.0,
            limit_s=0.05,
        )

    goes_on.set()
