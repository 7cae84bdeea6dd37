"""The time of training by phases."""

from __future__ import annotations

import pytest
from trainable import FakeClock

from sbp_launch.trainer import phases
from sbp_launch.trainer.phases import PhaseTimes


def test_shares_are_told_in_one_order_the_rest_last_and_none_of_what_was_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(phases.time, "perf_counter", clock)
    times = PhaseTimes()
    times.add("data", 1.0)
    times.add("steps", 20.0)
    times.add("data", 9.0)
    times.add("comparison", 0.01)

    clock.now += 99.0

    assert times["data"] == 10.0 and times["saving"] == 0.0
    assert times.line() == "100 s: steps 20.0%, data 10.0%, comparison 0.0%, rest 70.0%"


def test_what_fails_has_taken_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases.time, "perf_counter", FakeClock())
    times = PhaseTimes()

    with pytest.raises(ZeroDivisionError), times.timing("saving"):
        1 / 0  # noqa: B018

    assert times["saving"] == 1.0
