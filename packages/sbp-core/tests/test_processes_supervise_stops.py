"""A supervisor that stops gently passes signals on, and waits until all have saved."""

import os
import signal
import sys
import textwrap

import pytest
from supervised import Heard, python

from sbp_core.boxing.backend import LaunchSpec
from sbp_core.processes.supervisor import Line, supervise
from sbp_core.testing.signals import hears_signals

#: Saves when it is asked to stop, which takes longer than the grace of the supervisor.
_SAVER = """
import os, signal, sys, time
def say(text):  # a whole line at once, as two of these may write to one pipe
    os.write(1, text.encode() + b"\\n")
def stop(number, frame):
    say("saving")
    time.sleep({takes_s})
    say("saved")
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
signal.signal(signal.SIGUSR2, lambda number, frame: say("asked"))
say("ready")
time.sleep(600)
"""


def signals_when(text: str, times: int, number: int) -> Heard:
    """Send this process a signal when so many lines with a text have been heard."""
    heard: Heard

    def react(line: Line) -> None:
        if line.text == text and heard.texts.count(text) == times:
            os.kill(os.getpid(), number)

    heard = Heard(react)
    return heard


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@hears_signals()
def test_processes_that_stop_gently_take_the_time_to_save(number):
    heard = signals_when("ready", 2, number)
    specs = [python(_SAVER.format(takes_s=0.1 + rank), rank) for rank in (0, 1)]

    report = supervise(specs, on_line=heard, grace_s=0.01, timeout_s=60, stops_gently=True)

    assert heard.texts.count("saved") == 2
    assert report.stopped_by == number
    assert [end.code for end in report.exits] == [128 + number] * 2
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


@hears_signals()
def test_a_process_that_the_signal_ends_at_once_does_not_hurry_the_others():
    heard = signals_when("ready", 2, signal.SIGTERM)
    specs = [
        python("import time; print('ready', flush=True); time.sleep(600)"),
        python(_SAVER.format(takes_s=0.5), 1),
    ]

    report = supervise(specs, on_line=heard, grace_s=0.01, timeout_s=60, stops_gently=True)

    assert "saved" in heard.texts
    assert [end.code for end in report.exits] == [-signal.SIGTERM, 128 + signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@hears_signals()
def test_processes_that_are_asked_what_they_are_at_go_on(number):
    heard = signals_when("ready", 2, number)

    def on_line(line: Line) -> None:
        heard(line)
        if line.text == "asked" and heard.texts.count("asked") == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    program = _SAVER.format(takes_s=0.0).replace("signal.SIGUSR2", f"{int(number)}")
    specs = [python(program, rank) for rank in (0, 1)]

    def early(number: int, frame: object) -> None:
        """Have a handler, which the ranks' answers take the place of."""

    before = signal.signal(number, early)
    try:
        report = supervise(
            specs, on_line=on_line, timeout_s=60, stops_gently=True, asking=(number,)
        )
        assert signal.getsignal(number) == early
    finally:
        signal.signal(number, before)

    assert heard.texts.count("asked") == 2
    assert report.stopped_by == signal.SIGTERM
    assert [end.code for end in report.exits] == [128 + signal.SIGTERM] * 2


@pytest.mark.slow
@hears_signals()
def test_a_second_signal_leaves_them_a_moment():
    heard = signals_when("ready", 1, signal.SIGTERM)
    second = signals_when("saving", 1, signal.SIGTERM)

    def on_line(line: Line) -> None:
        heard(line)
        second(line)

    report = supervise(
        [python(_SAVER.format(takes_s=3600))],
        on_line=on_line,
        grace_s=0.3,
        timeout_s=600,
        stops_gently=True,
    )

    assert report.stopped_by == signal.SIGTERM and "saved" not in heard.texts


@hears_signals()
def test_the_ranks_of_a_launcher_get_the_signal_and_the_launcher_waits(tmp_path):
    (tmp_path / "rank.py").write_text(_SAVER.format(takes_s=0.1))
    launcher = f"""
    import subprocess, sys
    command = [sys.executable, {str(tmp_path / "rank.py")!r}]
    ranks = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
    """
    spec = LaunchSpec(command=(sys.executable, "-c", textwrap.dedent(launcher)), ranks=(0, 1))
    heard = signals_when("ready", 2, signal.SIGTERM)

    report = supervise([spec], on_line=heard, grace_s=0.01, timeout_s=60, stops_gently=True)

    assert heard.texts.count("saved") == 2
    assert [end.code for end in report.exits] == [143]
