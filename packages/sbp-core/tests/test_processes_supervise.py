"""A supervisor passes on what its processes write, and says how they have ended."""

import os
import pickle
import signal
import sys

import pytest
from supervised import LONG_S, STATE_OF, Heard, is_alive, python

from sbp_core.boxing.backend import LaunchSpec
from sbp_core.errors import RunError, SbpValueError
from sbp_core.processes.supervisor import Line, supervise


def sleeper(rank: int = 1) -> LaunchSpec:
    return python(f"import time; time.sleep({LONG_S})", rank)


def test_a_run_whose_processes_end_well_has_status_0_and_no_error():
    heard = Heard()

    ended = supervise([python(f"print('from {n}')", n) for n in range(3)], on_line=heard)

    assert ended.exit_status == 0
    assert ended.error() is None
    assert sorted(map(str, heard.lines)) == [f"rank {n} | from {n}" for n in range(3)]


def test_lines_of_a_process_keep_their_order_and_none_is_lost():
    heard = Heard()
    program = "import sys\nfor i in range(2000): print(i, file=(sys.stdout, sys.stderr)[i % 2])"

    supervise([python(program)], on_line=heard)

    assert heard.texts == [str(i) for i in range(2000)]


def test_lines_come_while_the_process_runs(tmp_path):
    came = tmp_path / "came"
    program = f"""
        import pathlib, time
        print("now")
        while not pathlib.Path({str(came)!r}).exists():
            time.sleep(0.01)
    """

    report = supervise([python(program)], on_line=lambda line: came.touch(), timeout_s=60)

    assert report.exit_status == 0


def test_what_is_no_utf_8_and_has_no_line_end_is_passed_on():
    heard = Heard()

    supervise([python(r"import sys; sys.stdout.buffer.write(b'a\xff\nb')")], on_line=heard)

    assert heard.texts == ["a�", "b"]


def test_lines_are_written_to_standard_output_by_default(capsys):
    supervise([python("print('hello')", 4)])

    assert capsys.readouterr().out == "rank 4 | hello\n"


def test_a_line_of_a_launcher_has_no_prefix():
    start = LaunchSpec(command=("mpiexec",), ranks=(0, 1))

    assert str(Line(spec=start, text="hello")) == "hello"


def test_an_exit_code_is_reported_with_the_rank_its_host_and_its_last_lines():
    heard = Heard()
    failing = python("import sys; print('so it is'); sys.exit(3)", 1)

    ended = supervise([sleeper(0), failing], grace_s=0.1, on_line=heard)

    assert ended.exit_status == 3
    assert ended.first is not None
    assert ended.first.spec.ranks == (1,)
    text = str(ended)
    assert text.startswith("rank 1 ended with exit code 3")
    assert "rank 0 was still running" in text
    assert f"process {ended.first.pid}" in text
    assert "so it is" in text
    assert "to fix it: " in text


def test_an_uncaught_exception_shows_its_traceback_and_pickles():
    ended = supervise([python("raise ValueError('no such luck')", 2)], on_line=Heard())

    error = pickle.loads(pickle.dumps(ended.error()))

    assert isinstance(error, RunError)
    assert "ValueError: no such luck" in str(error)
    assert ended.exit_status == 1


def test_last_lines_that_were_seen_need_not_be_quoted():
    ended = supervise([python("print('seen'); exit(1)")], on_line=Heard())

    assert "seen" in str(ended.error())
    assert "seen" not in str(ended.error(quote=False))


def test_the_others_have_the_grace_to_say_why_they_end(tmp_path):
    heard, path = Heard(), tmp_path / "pid"
    other = f"""
        import time
        {STATE_OF.format(path=str(path))}
        while state() not in ("Z", "gone"):
            time.sleep(0.01)
        time.sleep(0.5)
        print("rank 1 is gone")
        exit(4)
    """
    fails = f"import os, pathlib; pathlib.Path({str(path)!r}).write_text(str(os.getpid())); exit(3)"

    ended = supervise([python(other), python(fails, 1)], grace_s=60, on_line=heard)

    assert heard.texts == ["rank 1 is gone"]
    assert [end.code for end in ended.exits] == [3, 4]
    assert ended.exit_status == 3
    assert "then rank 0 ended with exit code 4" in str(ended)


def test_the_others_get_more_grace_as_long_as_they_need_it(tmp_path):
    other = """
        import sys, time
        print("saving", flush=True)
        time.sleep(1.0)
        print("saved", flush=True)
    """
    fails = "import time; time.sleep(0.3); exit(3)"
    heard = Heard()

    ended = supervise(
        [python(other), python(fails, 1)],
        grace_s=0.1,
        more_grace_s=lambda: 60.0 if heard.texts == ["saving"] else 0.0,
        on_line=heard,
    )

    assert heard.texts == ["saving", "saved"]
    assert [end.code for end in ended.exits] == [3, 0]


def test_who_is_stopped_gets_no_more_grace():
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"

    ended = supervise(
        [python("exit(3)"), python(stops, 1)], grace_s=0.5, more_grace_s=lambda: 600.0
    )

    assert [end.stopped for end in ended.remaining] == [True]


def test_a_killed_process_is_named_with_its_signal_and_the_others_are_ended():
    pids: list[int] = []

    def react(line: Line) -> None:
        pids.append(int(line.text))
        if len(pids) == 2:
            os.kill(int(line.text), signal.SIGKILL)

    program = f"import os, time; print(os.getpid()); time.sleep({LONG_S})"
    ended = supervise([python(program, n) for n in range(2)], grace_s=0.1, on_line=Heard(react))

    assert ended.exit_status == 128 + signal.SIGKILL
    assert ended.first is not None
    assert ended.first.pid == pids[1]
    assert "was ended by SIGKILL" in str(ended)
    assert not any(map(is_alive, pids))


def test_a_crash_points_to_the_fault_handler():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"

    ended = supervise([python(program)], on_line=Heard())

    assert ended.exit_status == 128 + signal.SIGSEGV
    assert "PYTHONFAULTHANDLER" in str(ended)


@pytest.mark.slow
def test_a_stopped_process_is_ended_at_the_timeout_and_said_to_have_been_stopped():
    pids: list[int] = []

    def react(line: Line) -> None:
        pids.append(int(line.text))
        os.kill(int(line.text), signal.SIGSTOP)

    program = f"import os, time; print(os.getpid()); time.sleep({LONG_S})"
    ended = supervise([python(program)], timeout_s=2, on_line=Heard(react))

    assert ended.exit_status == 124
    assert "took longer than 2 s: rank 0 had been stopped by a signal" in str(ended)
    assert not is_alive(pids[0])


def test_who_waited_for_a_rank_that_had_been_stopped_is_not_the_cause(tmp_path):
    path = tmp_path / "stopped"
    stops = f"""
        import os, pathlib, signal
        pathlib.Path({str(path)!r}).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    fails = f"""
        import sys, time
        {STATE_OF.format(path=str(path))}
        while state() != "T":
            time.sleep(0.01)
        sys.exit("nobody came")
    """

    ended = supervise([python(fails), python(stops, 1)], grace_s=0.2)

    assert ended.exit_status == 1
    assert str(ended).startswith("rank 1 had been stopped by a signal")
    assert "to fix it: see what stopped it" in str(ended)


def test_a_program_that_cannot_be_started_is_an_error_and_ends_the_others():
    heard = Heard()

    with pytest.raises(RunError, match="rank 1 cannot be started") as caught:
        supervise([sleeper(0), LaunchSpec(command=("no-such-program",), ranks=(1,))], on_line=heard)

    assert "no-such-program" in str(caught.value)


def test_a_start_sets_its_variables_and_leaves_set_ones_that_are_only_defaults(monkeypatch):
    monkeypatch.setenv("FIRST", "outer")
    monkeypatch.setenv("SECOND", "outer")
    heard = Heard()
    start = LaunchSpec(
        command=(sys.executable, "-c", "import os; print([os.environ[n] for n in ('FIRST', "
                 "'SECOND', 'THIRD')])"),
        ranks=(0,),
        environment={"FIRST": "own"},
        defaults={"SECOND": "default", "THIRD": "default"},
    )  # fmt: skip

    supervise([start], on_line=heard)

    assert heard.texts == ["['own', 'outer', 'default']"]


@pytest.mark.parametrize(
    ("ranks", "name"), [((3,), "rank 3"), ((0, 1, 2), "ranks 0-2"), ((1, 4), "ranks 1, 4")]
)
def test_a_start_is_called_by_its_ranks(ranks, name):
    assert LaunchSpec(command=("program",), ranks=ranks).name == name


def test_a_start_needs_a_command_and_ranks():
    with pytest.raises(SbpValueError):
        LaunchSpec(command=(), ranks=(0,))
    with pytest.raises(SbpValueError):
        LaunchSpec(command=("program",), ranks=())
