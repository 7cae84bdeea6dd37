"""Ctrl-C in a loop of one's own, at any moment: states of a whole step, and a session that goes on.

A moment is a line of Python that the main thread is about to run, as signals come between them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import interrupted_ranks
import pytest
import torch
from plain_training import batch_of, loss_of, make_model, make_optimizer
from programs import registry

from sbp_core.processes import Line, supervise
from sbp_core.testing.signals import hears_signals
from sbp_launch import parallelize

NUM_MOMENTS = 12


class Moments:
    """Counts the lines that are run in the block, and presses Ctrl-C at some of them."""

    def __init__(self, pressed: Collection[int] = ()) -> None:
        self.count, self._pressed = 0, pressed

    def __enter__(self) -> Moments:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count in self._pressed:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def started(layout: dict[str, Any]) -> Any:
    model = make_model()
    return parallelize(model, loss_of, batch_of(0), make_optimizer(model), **layout).start()


def whole_states(layout: dict[str, Any], steps: int) -> list[dict[str, torch.Tensor]]:
    """Return the states behind each step of a loop that nobody interrupts."""
    step = started(layout)
    found = [step.state_dict()]
    for index in range(steps):
        step(batch_of(index))
        found.append(step.state_dict())
    step.close()
    return found


def assert_whole(step: Any, whole: list[dict[str, torch.Tensor]]) -> None:
    wanted = whole[step.steps_done]
    found = step.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


LAYOUTS = [
    {"mesh": 2, "planner": "manual/zero"},
    {"mesh": {"pipe": 2}, "planner": "manual/pipeline"},
    {"mesh": 2, "runtime": "reference"},
]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    with hears_signals():
        yield


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_interrupt_at_any_moment_leaves_a_whole_step_and_the_session_goes_on(
    layout: dict[str, Any],
) -> None:
    whole = whole_states(layout, NUM_MOMENTS + 3)
    step = started(layout)
    step(batch_of(0))
    with Moments() as moments:
        step(batch_of(1))
    interrupts = 0
    for number in range(NUM_MOMENTS):
        try:
            with Moments({1 + number * moments.count // NUM_MOMENTS}):
                step(batch_of(step.steps_done))
        except KeyboardInterrupt:
            interrupts += 1
        assert_whole(step, whole)
    step(batch_of(step.steps_done))
    assert_whole(step, whole)
    step.close()

    assert interrupts >= NUM_MOMENTS - 1  # the count of lines varies a little


@pytest.mark.parametrize("number", [0, 2])
def test_two_interrupts_in_one_step_leave_a_whole_step(number: int) -> None:
    layout = LAYOUTS[0]
    whole = whole_states(layout, 3)
    step = started(layout)
    step(batch_of(0))
    with Moments() as moments:
        step(batch_of(1))
    first = (1 + number) * moments.count // 5

    with pytest.raises(KeyboardInterrupt), Moments({first, first + moments.count // 6}):
        step(batch_of(2))

    assert_whole(step, whole)
    step.close()


def test_processes_raise_ctrl_c_behind_the_same_step_and_go_on() -> None:
    backend: Any = registry().make("boxing", "torch", {})
    lines: list[Line] = []
    command = [sys.executable, str(Path(interrupted_ranks.__file__))]

    ended = supervise(backend.launch_specs(2, command), timeout_s=240, on_line=lines.append)

    assert ended.error() is None, "\n".join(map(str, lines))
    wanted = whole_states({"mesh": 2}, interrupted_ranks.NUM_STEPS)[-1]
    total = sum(
        float(value.double().sum()) for name, value in wanted.items() if name in make_names()
    )
    for line in lines:
        if line.text.startswith("{"):
            found = json.loads(line.text)
            assert found["interrupted"] == [*interrupted_ranks.PRESSED, "evaluation"]
            assert found["total"] == pytest.approx(total, abs=1e-9)


def make_names() -> set[str]:
    """Return the names of the states that a model has."""
    return set(make_model().state_dict())
