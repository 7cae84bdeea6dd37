"""A call that may be abandoned: what it returns, and what becomes of it once nobody waits."""

from __future__ import annotations

import threading

import pytest

from sbp_core.boxing.processes.abandonable import run_abandonable


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
