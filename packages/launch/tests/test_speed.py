"""The speed of a run: of which steps, and what does not count."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainable import FakeClock, registry, run_config

from sbp_launch.planning.one_device import EagerReference
from sbp_launch.run import speed as speed_module
from sbp_launch.run.speed import WINDOW, Speed
from sbp_launch.trainer import trainer
from sbp_torch.runtime.reference import ReferenceSession


def timed(seconds: list[float], units: int = 12) -> Speed:
    """Return the speed of steps that took so long, with an hour between them."""
    clock = FakeClock()
    speed = Speed("tokens", clock=clock)
    for taken in seconds:
        clock.now += 3600
        speed.begin()
        clock.now += taken - 1
        speed.end(units)
    return speed


def test_the_first_step_is_told_as_what_it_is() -> None:
    speed = timed([6.0])

    assert speed.text() == "first step: 6 s"
    assert speed.summary() == ""


def test_the_first_step_and_what_lies_between_steps_do_not_count() -> None:
    speed = timed([600.0, 2.0, 4.0])

    assert speed.text() == "4 tokens/s"
    assert speed.left_s(10) == pytest.approx(30.0)
    assert (speed.step_s, speed.step_rate) == (pytest.approx(4.0), pytest.approx(3.0))


def test_a_slow_run_has_a_speed_too() -> None:
    assert timed([100.0, 50.0]).text() == "0.24 tokens/s"
    assert timed([1.0, 1.0], units=12345).text() == "12,345 tokens/s"


def test_only_the_newest_steps_tell_the_speed_and_the_time_left() -> None:
    speed = timed([600.0] * 50 + [2.0] * WINDOW)

    assert speed.text() == "6 tokens/s"
    assert speed.left_s(3) == pytest.approx(6.0)


def test_the_summary_is_the_median_without_the_first_steps() -> None:
    assert timed([600.0] * 3 + [3.0, 4.0, 6.0, 4.0]).summary() == (
        "3 tokens/s (median of steps 4-7)"
    )
    assert timed([600.0] * 10 + [3.0] * 20).summary() == "4 tokens/s (median of steps 11-30)"


def test_steps_of_a_run_that_goes_on_have_their_numbers() -> None:
    speed = Speed("tokens", clock=FakeClock(), begun=100)
    for _ in range(8):
        speed.begin()
        speed.end(12)

    assert speed.summary().endswith("(median of steps 105-108)")


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=60))
def test_the_time_left_is_that_of_the_fastest_to_the_slowest_step(seconds: list[float]) -> None:
    speed = timed(seconds)
    counted = seconds[1:][-WINDOW:] or seconds

    each = speed.left_s(100) / 100
    assert min(counted) - 1e-6 <= each <= max(counted) + 1e-6


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"step \d|\d steps", line)]


@pytest.mark.slow
def test_the_comparison_with_one_device_does_not_change_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(speed_module.time, "perf_counter", clock)
    monkeypatch.setattr(Speed.__init__, "__defaults__", (clock, 0))
    step, compare = ReferenceSession.step, EagerReference.step

    def slow_step(self: ReferenceSession, *given: object, **named: str) -> object:
        clock.now += 2.0
        return step(self, *given, **named)

    def very_slow_comparison(self: EagerReference, *given: object) -> None:
        clock.now += 1000.0
        compare(self, *given)

    monkeypatch.setattr(ReferenceSession, "step", slow_step)
    monkeypatch.setattr(EagerReference, "step", very_slow_comparison)
    told, logged = [], []
    for number, compare_steps in enumerate((0, 4)):
        folder = tmp_path / str(number)
        trainer.train(run_config(steps=6, compare_steps=compare_steps), registry(), folder)
        told.append(lines_of(capsys.readouterr().out))
        records = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        logged.append([json.loads(line) for line in records])

    # 16 tokens in a step: 2 s, and one for each look at the clock.
    assert told[0] == told[1]
    assert re.fullmatch(r"step 6/6  loss \d\.\d{4}  2\.67 tokens/s  0 s left", told[0][-2])
    assert told[0][-1] == "6 steps, 2.67 tokens/s (median of steps 4-6)"
    assert logged[0] == logged[1]
    assert {record["step_s"] for record in logged[0]} == {6.0}
    assert {record["data_s"] for record in logged[0]} == {1.0}
    assert {record["tokens_per_s"] for record in logged[0]} == {16 / 6}
