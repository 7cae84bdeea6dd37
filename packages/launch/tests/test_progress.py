import io
import re

import pytest
from rich.console import Console

from sbp_launch.progress import StepProgress, timed


def test_plain_lines_come_every_so_many_steps_and_at_both_ends():
    out = io.StringIO()
    console = Console(file=out, width=120)

    with StepProgress(console, 7, 3, "tokens") as progress:
        for step in range(1, 8):
            progress.advance(step, 1.5, 100)

    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "6/7", "7/7"]
    assert "loss 1.5000" in lines[0]
    assert "tokens/s" in lines[0]
    assert lines[-1].endswith("0 s left")


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

    with StepProgress(console, 2, 1, "samples") as progress:
        progress.advance(1, 0.25, 4)
        progress.advance(2, 0.125, 4)

    assert "training" in out.getvalue()
    assert "loss 0.1250" in out.getvalue()
    assert "2/2" in out.getvalue()


def test_the_rate_counts_units_over_time():
    progress = StepProgress(Console(file=io.StringIO()), 1, 1, "tokens")
    progress.started -= 2.0

    progress.advance(1, 1.0, 100)

    assert 40 < progress.rate() <= 50
