import io
import re

import pytest
from rich.console import Console
from trainable import FakeClock

from sbp_launch.run.progress import StepProgress, timed
from sbp_launch.run.speed import Speed


def test_plain_lines_come_every_so_many_steps_and_at_both_ends():
    out = io.StringIO()
    console = Console(file=out, width=120)

    speed = Speed("tokens", clock=FakeClock())
    with StepProgress(console, 7, 3, speed) as progress:
        for step in range(1, 8):
            speed.begin()
            speed.end(100)
            progress.advance(step, 1.5)

    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "6/7", "7/7"]
    assert lines[0] == "step 1/7  loss 1.5000  first step: 1 s"
    assert lines[1] == "step 3/7  loss 1.5000  100 tokens/s  4 s left"
    assert lines[-1] == "step 7/7  loss 1.5000  100 tokens/s  0 s left"


@pytest.mark.parametrize(
    ("steps", "left"), [(501, "499 s"), (3002, "50 min"), (9002, "2.5 h"), (90002, "25.0 h")]
)
def test_a_long_wait_is_told_in_minutes_or_hours(steps, left):
    out = io.StringIO()
    speed = Speed("tokens", clock=FakeClock())

    with StepProgress(Console(file=out, width=120), steps, 1, speed) as progress:
        for step in (1, 2):
            speed.begin()
            speed.end(100)
            progress.advance(step, 1.5)

    assert out.getvalue().endswith(f"100 tokens/s  {left} left\n")


def taken(progress: StepProgress, steps: range) -> None:
    """Report steps of a second, each with the time of training that it ends at."""
    for step in steps:
        progress.speed.begin()
        progress.speed.end(100)
        progress.advance(step, 1.5, 60.0 * step)


def test_a_budget_of_time_is_told_by_the_time_that_is_left():
    out, shown = io.StringIO(), io.StringIO()
    bar = Console(file=shown, width=100, force_terminal=True)

    for console in (Console(file=out, width=100), bar):
        speed = Speed("tokens", clock=FakeClock())
        with StepProgress(console, None, 20, speed, hours=1.0) as progress:
            taken(progress, range(1, 31))

    assert out.getvalue().splitlines() == [
        "step 1  loss 1.5000  first step: 1 s  59 min left",
        "step 20  loss 1.5000  100 tokens/s  40 min left",
    ]
    last = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).splitlines()[-1]
    assert "30 loss 1.5000  100 tokens/s  30 min left" in last


def test_a_run_that_goes_on_tells_of_its_first_step():
    out = io.StringIO()
    speed = Speed("tokens", clock=FakeClock())

    with StepProgress(Console(file=out, width=100), 60, 20, speed, begun=50) as progress:
        taken(progress, range(51, 61))

    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["51/60", "60/60"]
    assert "51/60  loss 1.5000  first step: 1 s" in out.getvalue()


def test_the_bar_shows_everything_on_a_terminal_of_80_columns():
    out = io.StringIO()
    speed = Speed("tokens", clock=FakeClock())

    with StepProgress(Console(file=out, width=80, force_terminal=True), 3000, 1, speed) as progress:
        for step in range(1, 124):
            speed.begin()
            speed.end(14452)
            progress.advance(step, 4.0167)

    shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "123/3000" in shown
    assert "loss 4.0167  14,452 tokens/s  48 min left" in shown


def test_each_part_of_a_start_is_said_before_it_begins_and_timed():
    out = io.StringIO()
    console = Console(file=out, width=100)

    with timed(console, "capturing"):
        before = out.getvalue()
    with pytest.raises(ValueError), timed(console, "planning"):
        raise ValueError

    assert before == "capturing ..."
    assert re.fullmatch(r"capturing \.\.\. \d+\.\d s\nplanning \.\.\.\n", out.getvalue())


def test_a_terminal_gets_a_bar():
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)

    speed = Speed("samples", clock=FakeClock())
    with StepProgress(console, 2, 1, speed) as progress:
        for step, loss in ((1, 0.25), (2, 0.125)):
            speed.begin()
            speed.end(4)
            progress.advance(step, loss)

    assert "training" in out.getvalue()
    assert "loss 0.1250" in out.getvalue()
    assert "2/2" in out.getvalue()
    assert "4 samples/s  0 s left" in out.getvalue()
