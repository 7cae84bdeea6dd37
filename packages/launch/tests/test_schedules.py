"""Schedules: what the learning rate is multiplied by, step by step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_launch.settings.budget import ScheduleConfig

DECAYS = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")


def test_a_constant_schedule_changes_nothing() -> None:
    assert [ScheduleConfig().factor(step, 3) for step in range(5)] == [1.0] * 5


def test_the_warm_up_rises_by_equal_parts_to_one() -> None:
    schedule = ScheduleConfig(warmup_steps=4)

    assert [schedule.factor(step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_decay_ends_at_its_final_factor() -> None:
    schedule = ScheduleConfig(decay="linear", warmup_steps=2, final=0.5)

    assert [schedule.factor(step, 6) for step in (2, 4, 6, 9)] == [1.0, 0.75, 0.5, 0.5]


def test_a_cosine_decay_is_half_way_in_the_middle() -> None:
    schedule = ScheduleConfig(decay="cosine", final=0.2)

    found = [schedule.factor(step, 8) for step in (0, 2, 4, 8)]

    quarter = 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2
    assert found == pytest.approx([1.0, quarter, 0.6, 0.2])


def test_warm_up_stable_decay_stays_at_one_until_the_last_steps() -> None:
    schedule = ScheduleConfig(decay="wsd", warmup_steps=2, decay_ratio=0.5, final=0.2)

    found = [schedule.factor(step, 10) for step in range(11)]

    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    quarter = ScheduleConfig(decay="wsd", decay_ratio=0.25)
    assert [quarter.factor(step, 8) for step in (0, 5, 6, 7, 8)] == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_a_run_whose_end_is_not_known_yet_has_not_begun_to_decay() -> None:
    assert ScheduleConfig(decay="cosine").factor(0, math.inf) == 1.0


def test_an_inverse_root_goes_on_from_the_warm_up() -> None:
    schedule = ScheduleConfig(decay="inverse_sqrt", warmup_steps=4)

    assert [schedule.factor(step, 9) for step in (3, 4, 16)] == [1.0, 1.0, 0.5]
    at_once = ScheduleConfig(decay="inverse_sqrt")
    assert [at_once.factor(step, 9) for step in (0, 3)] == [1.0, 0.5]


@given(
    decay=st.sampled_from(DECAYS),
    warmup=st.integers(0, 20),
    final=st.floats(0, 1),
    steps=st.integers(1, 40),
)
def test_factors_are_fractions_that_fall_after_the_warm_up(
    decay: str, warmup: int, final: float, steps: int
) -> None:
    schedule = ScheduleConfig(decay=decay, warmup_steps=warmup, final=final)  # type: ignore[arg-type]

    factors = [schedule.factor(step, steps) for step in range(warmup, steps + warmup + 2)]

    assert all(0.0 <= factor <= 1.0 + 1e-12 for factor in factors)
    assert all(b <= a + 1e-12 for a, b in pairwise(factors))


@pytest.mark.parametrize(
    "settings",
    [{"warmup_steps": -1}, {"final": 1.5}, {"final": math.nan}, {"decay_ratio": 0.0}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ScheduleConfig(**settings)  # type: ignore[arg-type]
