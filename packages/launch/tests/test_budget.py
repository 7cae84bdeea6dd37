"""Budgets: when a run ends, how many steps that is, and where schedules are in it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_core.plugins import TrainerState
from sbp_launch.settings.budget import Allowance, Budget

SAMPLES, TOKENS, EPOCH = 8, 800, 100


def allowance(unit: Any, amount: float, **changes: int) -> Allowance:
    sizes = {"step_samples": SAMPLES, "step_tokens": TOKENS, "epoch_samples": EPOCH, **changes}
    return Budget(unit=unit, amount=amount).allowance(**sizes)


def after(steps: int, *, each: int = SAMPLES, begun: TrainerState | None = None) -> TrainerState:
    """Return the state behind some steps of so many samples, of 100 tokens and a minute each."""
    old = begun or TrainerState()
    return replace(
        old,
        step=old.step + steps,
        samples=old.samples + steps * each,
        tokens=old.tokens + steps * each * 100,
        train_s=old.train_s + 60.0 * steps,
    )


@pytest.mark.parametrize(
    ("unit", "amount", "steps"),
    [
        ("steps", 7, 7),
        ("epochs", 1, 13),  # 12.5 steps
        ("epochs", 0.5, 7),  # 6.25 steps
        ("epochs", 0.085, 2),  # 8.5 samples, so 9
        ("tokens", 801, 2),
        ("tokens", 800, 1),
        ("hours", 0.1, 6),
    ],
)
def test_a_run_ends_behind_the_step_that_reaches_its_budget(
    unit: str, amount: float, steps: int
) -> None:
    found = allowance(unit, amount)

    assert [found.is_spent(after(n)) for n in (0, steps - 1, steps)] == [False, False, True]
    assert found.total_steps(TrainerState()) == (None if unit == "hours" else steps)


@pytest.mark.slow
@given(st.sampled_from(["steps", "epochs", "tokens"]), st.integers(1, 40), st.integers(0, 60))
def test_a_stop_changes_neither_the_end_nor_the_place_in_the_run(
    unit: str, amount: int, steps: int
) -> None:
    found = allowance(unit, amount)
    total = found.total_steps(TrainerState())
    assert total is not None
    state = after(min(steps, total))

    assert found.total_steps(state) == total
    assert found.is_spent(state) is (state.step == total)
    step, of = found.place(state)
    assert (step, of) == (state.step, total)


def test_after_a_change_of_batch_size_a_schedule_goes_on_where_it_was() -> None:
    # 200 epochs are 2,500 steps of 8 samples; half of them are done.
    state = after(1250)

    found = allowance("epochs", 200, step_samples=16, step_tokens=1600)

    assert found.place(state) == (625.0, 1250)
    assert found.total_steps(state) == 1250 + 625
    assert found.is_spent(after(625, each=16, begun=state))


def test_the_steps_of_a_budget_of_time_are_those_at_the_pace_so_far() -> None:
    found = allowance("hours", 1)

    assert found.place(TrainerState()) == (0, math.inf)
    assert found.place(after(15)) == (15, pytest.approx(60.0))
    assert found.place(after(60)) == (60, pytest.approx(60.0))


def test_tokens_of_data_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.tokens=5: the data have no tokens"):
        allowance("tokens", 5, step_tokens=0)
