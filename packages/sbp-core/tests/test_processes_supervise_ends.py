"""A supervisor leaves no process behind, however it ends, and ends none that is not its own."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
from supervised import LONG_S, Heard, is_alive, python

from sbp_core.boxing.backend import LaunchSpec
from sbp_core.processes.reaper import end_processes, is_stopped
from sbp_core.processes.supervisor import Line, supervise
from sbp_core.testing.signals import hears_signals


def wait_for(done, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_rank_of_a_launcher_that_others_say_is_stopped_is_ended_at_once():
    program = (
        "import os, signal, subprocess, sys; "
        f"rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({LONG_S})']); "
        "os.kill(rank.pid, signal.SIGSTOP); "
        "os.waitpid(rank.pid, os.WUNTRACED); "  # until it is stopped
        "print(f'rank 1 (pid {rank.pid} on this host): is stopped by a signal', flush=True); "
        "print('its code:', rank.wait()); sys.exit(1)"
    )

    ended = supervise([LaunchSpec(command=(sys.executable, "-c", program), ranks=(0, 1))])

    assert "its code: -9" in str(ended)
    assert "rank 1 failed first" in str(ended)


def test_a_rank_that_goes_on_is_not_ended_whatever_is_said_of_it():
    program = (
        "import subprocess, sys; "
        "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.5)']); "
        "print(f'rank 1 (pid {rank.pid} on this host): is stopped by a signal', flush=True); "
        "sys.exit(rank.wait() != 0)"
    )

    ended = supervise([LaunchSpec(command=(sys.executable, "-c", program), ranks=(0, 1))])

    assert ended.exit_status == 0


def test_a_process_that_is_not_of_the_run_is_not_ended_whatever_is_said_of_it():
    other = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG_S})"])
    try:
        os.kill(other.pid, signal.SIGSTOP)
        words = f"rank 1 (pid {other.pid} on this host): is stopped by a signal"

        supervise([LaunchSpec(command=(sys.executable, "-c", f"print({words!r})"), ranks=(0, 1))])

        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_flood_of_lines_does_not_outlive_the_timeout():
    ended = supervise([python("while True: print(1)")], timeout_s=1, on_line=Heard())

    assert ended.exit_status == 124


@pytest.mark.slow
def test_a_process_that_ignores_sigterm_is_killed():
    pids: list[int] = []
    program = f"""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid())
        time.sleep({LONG_S})
    """

    supervise(
        [python(program)], timeout_s=2, on_line=Heard(lambda said: pids.append(int(said.text)))
    )

    assert not is_alive(pids[0])


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_hears_that_it_is_ended_and_its_last_words_are_passed_on(stopped):
    def react(line: Line) -> None:
        if stopped and line.text.isdecimal():
            os.kill(int(line.text), signal.SIGSTOP)

    heard = Heard(react)
    program = f"""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("farewell"))
        print(os.getpid())
        time.sleep({LONG_S})
    """

    supervise([python(program)], timeout_s=2, on_line=heard)

    assert heard.texts[-1] == "farewell"


_PARENT = f"""
    import os, subprocess, sys, time
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep({LONG_S})"],
        start_new_session=bool(int(os.environ["APART"])),
    )
    print(child.pid)
    if os.environ["AFTER"] == "fail": sys.exit(1)
    if os.environ["AFTER"] == "wait": child.wait()
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("apart", ["0", "1"], ids=["same group", "session of its own"])
@pytest.mark.parametrize("after", ["end", "fail", "wait"])
def test_what_a_process_has_started_ends_with_the_run(after, apart):
    heard = Heard()

    supervise(
        [python(_PARENT, APART=apart, AFTER=after)],
        timeout_s=2 if after == "wait" else None,
        grace_s=0.1,
        on_line=heard,
    )

    assert not is_alive(int(heard.texts[0]))


_RANK = f"""
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({LONG_S})"])
    try:
        print(os.getpid(), child.pid)
        time.sleep({LONG_S})
    except KeyboardInterrupt:
        print("saved")
"""


_SUPERVISOR = """
    import sys
    from sbp_core.boxing import LaunchSpec
    from sbp_core.processes.supervisor import supervise
    command = (sys.executable, "-c", sys.argv[1])
    supervise([LaunchSpec(command=command, ranks=(n,)) for n in range(2)])
"""


@contextlib.contextmanager
def supervised(hangup: signal.Handlers = signal.SIG_DFL) -> Iterator[tuple[subprocess.Popen, list]]:
    """Start a supervisor of two ranks, each with a child: it, and the four process ids.

    Args:
        hangup: What it does at a SIGHUP, whatever the tests do themselves: what `nohup` starts
            ignores it, and so does all that is started then.
    """
    command = [sys.executable, "-c", textwrap.dedent(_SUPERVISOR), textwrap.dedent(_RANK)]
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        it = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGHUP, before)
    with it:
        try:
            said = [it.stdout.readline() for _ in range(2)]
            yield it, [int(word) for line in said for word in line.partition("|")[2].split()]
        finally:
            it.kill()  # or a test that fails would wait for it until the ranks have slept enough


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
@hears_signals()
def test_nothing_is_left_when_the_supervisor_is_ended(number):
    with supervised() as (it, pids):
        it.send_signal(number)
        rest, errors = it.communicate(timeout=60)

    wait_for(lambda: not any(map(is_alive, pids)))
    assert len(pids) == 4
    assert rest.count("saved") == (2 if number == signal.SIGINT else 0)
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    expected = {signal.SIGTERM: 143, signal.SIGHUP: 129}
    assert it.returncode == expected.get(number, -number)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
@hears_signals()
def test_what_nohup_started_outlives_its_terminal_and_ends_when_it_is_told_to(number, code):
    with supervised(hangup=signal.SIG_IGN) as (it, pids):
        it.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert it.poll() is None
        assert all(map(is_alive, pids))

        it.send_signal(number)
        it.communicate(timeout=60)

    wait_for(lambda: not any(map(is_alive, pids)))
    assert len(pids) == 4
    assert it.returncode == code


def test_an_error_of_the_caller_ends_all_processes():
    pids: list[int] = []

    def react(line: Line) -> None:
        pids.append(int(line.text))
        raise LookupError("not what was expected")

    program = f"import os, time; print(os.getpid()); print(0); time.sleep({LONG_S})"
    with pytest.raises(LookupError):
        supervise([python(program)], on_line=react)

    assert len(pids) == 1
    assert not is_alive(pids[0])


def test_handlers_of_signals_are_as_before_after_a_run():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]

    supervise([python("pass")])

    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_processes_of_another_mark_are_left_alone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        end_processes([], "SBP_NOT_THIS_ONE", 0.0)

        assert is_alive(other.pid)
        other.kill()


def test_a_process_that_does_not_exist_is_not_stopped():
    assert not is_stopped(2**22 + 1)
