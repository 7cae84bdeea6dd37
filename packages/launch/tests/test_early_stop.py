"""The callback `early_stop`: behind which evaluation it ends a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sbp_core.plugins import TrainerState
from sbp_launch.trainer.early_stop import EarlyStop, EarlyStopConfig

NAN, INF = math.nan, math.inf


def ended(found: list[float], **settings: Any) -> int | None:
    """Return the evaluation, from 0, behind which it ends a run; None if behind none."""
    callback = EarlyStop(EarlyStopConfig(**settings))
    for index, value in enumerate(found):
        control = callback.on_evaluate(TrainerState(), {"held_out_loss": value})
        if control is not None and control.stop:
            return index
    return None


@pytest.mark.parametrize(
    ("found", "settings", "last"),
    [
        ([3.0, 2.0, 2.5, 2.25], {"patience": 2}, 3),
        ([3.0, 2.0, 2.0, 2.0], {"patience": 2}, 3),
        ([3.0, 3.5, 2.0, 2.5, 2.25], {"patience": 2}, 4),  # a better one begins the count anew
        ([3.0, 2.5, 2.0, 1.5], {"patience": 1}, None),
        ([3.0, 2.5, 2.0, 1.5], {"patience": 2, "min_delta": 0.75}, None),
        ([3.0, 2.5, 2.25, 1.5], {"patience": 2, "min_delta": 0.75}, 2),
        ([1.0, 2.0, 1.5, 1.75], {"patience": 2, "mode": "max"}, 3),
        ([1.0, 2.0, 3.0, 4.0], {"patience": 1, "mode": "max"}, None),
        ([1.0, 1.5, 2.0, 2.5], {"patience": 2, "mode": "max", "min_delta": 0.75}, None),
        ([NAN, 3.0, 2.0, 1.0], {"patience": 2}, None),  # no number is no best one
        ([-INF, 3.0, 2.0, 1.0], {"patience": 2}, None),
        ([3.0, NAN, INF], {"patience": 2}, 2),
        ([1.0, INF, INF], {"patience": 2, "mode": "max"}, 2),
    ],
)
def test_a_run_ends_when_it_has_not_become_better_for_a_while(
    found: list[float], settings: dict[str, Any], last: int | None
) -> None:
    assert ended(found, **settings) == last


def test_what_is_said_counts_the_evaluations() -> None:
    callback = EarlyStop(EarlyStopConfig(patience=1))

    controls = [callback.on_evaluate(TrainerState(), {"held_out_loss": 1.0}) for _ in range(2)]

    assert controls[0] is None and controls[1] is not None
    assert controls[1].stop == "held_out_loss has not improved for 1 evaluation"
