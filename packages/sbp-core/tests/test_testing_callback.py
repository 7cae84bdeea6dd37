"""The suite of callbacks: passed by one that counts, failed by broken ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sbp_core.errors import SbpValueError
from sbp_core.plugins import Callback, TrainerControl, TrainerState, TrainingContext
from sbp_core.serialize import dump, load
from sbp_core.testing.callback import CallbackConformance


class Counting(Callback):
    """Asks for an evaluation behind every third step that it has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step_end(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        self.seen += 1
        return None if self.seen % 3 else TrainerControl(evaluate=True)

    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


class TestCounting(CallbackConformance):
    def make_callback(self) -> Callback:
        return Counting()


class Forgetful(Counting):
    def state_dict(self) -> Mapping[str, Any]:
        return {}


class WritesAnywhere(Callback):
    def on_train_begin(self, context: TrainingContext, state: TrainerState) -> None:
        (context.folder / "mine.txt").write_text("begun", "utf-8")


class KeepsObjects(Callback):
    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": {1, 2}}


class SaysYes(Callback):
    def on_step_end(self, state: TrainerState, metrics: Mapping[str, float]) -> Any:
        return True


class Differs(Callback):
    made = 0

    def __init__(self) -> None:
        Differs.made += 1
        self.number = Differs.made

    def on_step_end(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        return TrainerControl(stop="odd") if self.number % 2 else None


@pytest.mark.parametrize(
    ("make", "test"),
    [
        (Forgetful, "test_a_resumed_run_goes_on_as_the_unbroken_one"),
        (WritesAnywhere, "test_only_the_first_process_writes"),
        (KeepsObjects, "test_its_state_is_plain_json"),
        (SaysYes, "test_it_can_be_led_through_a_run"),
        (Differs, "test_two_of_them_ask_for_the_same"),
    ],
)
def test_a_broken_callback_fails(make: Callable[[], Callback], test: str, tmp_path: Path) -> None:
    class Suite(CallbackConformance):
        def make_callback(self) -> Callback:
            return make()

    with pytest.raises((AssertionError, SbpValueError, TypeError)):
        getattr(Suite(), test)(tmp_path)


def test_a_state_comes_back_from_json() -> None:
    state = TrainerState(
        step=7, samples=28, tokens=112, epoch=1, train_s=0.1, best=2.5, best_step=4,
        callbacks={"early_stop": {"best": 2.5, "worse": 1}},
    )  # fmt: skip

    assert load(dump(state, TrainerState), TrainerState) == state


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"step": -1}, "step=-1"),
        ({"train_s": float("nan")}, "train_s=nan"),
        ({"best": 1.0}, "best_step=None"),
        ({"best": 1.0, "best_step": 8}, "best_step=8"),
    ],
)
def test_a_state_that_cannot_be_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SbpValueError, match=named):
        TrainerState(**{"step": 7, **changes})
