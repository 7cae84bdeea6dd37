"""The lines are those of Open MPI, and of errors of boxing."""

import signal
import sys

import pytest

from sbp_core.boxing.backend import LaunchSpec
from sbp_core.processes import supervisor
from sbp_core.processes.exit_report import RootCauseFinder
from sbp_core.processes.supervisor import supervise

ABORT = "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD"
SIGNAL = "prterun noticed that process rank 1 with PID 29877 on node vm exited on"
CUT_SHORT = "sbp_core.errors.BoxingError: boxing step 'step 3' could not complete: "
LATE = "boxing step 'step 3' waited 3 s; ranks that did not arrive: 1"
NOT_WRITTEN = "the checkpoint step-2 cannot be written: rank 1 says: ValueError: no"
PATTERNS = (r"process rank (?P<rank>\d+) with PID", r"MPI_ABORT was invoked on rank (?P<rank>\d+)")


def found(*lines: str, ranks: tuple[int, ...] = (0, 1, 2)) -> tuple[str, str] | None:
    finder = RootCauseFinder(
        LaunchSpec(command=("mpiexec",), ranks=ranks, failure_patterns=PATTERNS)
    )
    for line in lines:
        finder.read(line)
    return finder.found


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([CUT_SHORT + "rank 1 (pid 7 on this host) has ended"], "rank 1 (pid 7"),
        ([CUT_SHORT + "rank 1 reported: ValueError: no"], "rank 1 reported: ValueError: no"),
        ([LATE], "ranks that did not arrive: 1"),
        (
            ["rank 0 waited for ranks that did not open their boxing backend: 1"],
            "ranks that did not open their boxing backend: 1",
        ),
        # Who reports a late rank is not the late one.
        ([CUT_SHORT + "rank 0 reported: " + LATE], "ranks that did not arrive: 1"),
        # Who is late may have waited for one that does nothing any more.
        (
            [
                "boxing step 'step 3' waited 3 s; ranks that did not arrive: 2",
                "  in rank 2 (pid 8 on this host): is running; it waits in boxing step 'step 2'",
                "  in rank 1 (pid 7 on this host): is stopped by a signal",
            ],
            "rank 1 (pid 7 on this host): is stopped by a signal",
        ),
        (
            [CUT_SHORT + "rank 1 (pid 7 on this host) is stopped by a signal, and for 10 s"],
            "rank 1 (pid 7 on this host) is stopped by a signal",
        ),
        # One rank ends the job because of another.
        ([ABORT, LATE], "ranks that did not arrive: 1"),
        ([ABORT, SIGNAL], "prterun noticed"),
        # Who waited for a checkpoint may end the job before who could not write it.
        ([f"sbp-train: rank 2 (pid 9): {NOT_WRITTEN}", ABORT], "rank 1 says: ValueError: no"),
        ([NOT_WRITTEN.replace("1", "2"), LATE], "ranks that did not arrive: 1"),
    ],
)
def test_the_rank_is_found_that_the_others_missed(lines: list[str], words: str) -> None:
    rank, said = found(*lines) or ("", "")

    assert rank == "1"
    assert said.startswith(words)


def test_who_ended_the_job_is_named_if_nobody_says_more() -> None:
    assert found("loss is not a number", ABORT) == ("2", ABORT)


def test_a_checkpoint_that_a_later_one_makes_up_for_is_no_cause() -> None:
    assert found(f"WARNING saves: step-2 is not saved: {NOT_WRITTEN}", ABORT) == ("2", ABORT)


def test_nobody_is_named_without_a_word() -> None:
    assert found("step 3", "rank 1 is fine", CUT_SHORT + "connection reset by peer") is None


def test_a_single_rank_names_another_that_it_waited_for_but_not_itself() -> None:
    assert found(LATE, ABORT, ranks=(0,)) == ("1", "ranks that did not arrive: 1")
    assert found(LATE, ABORT, ranks=(1,)) is None
    assert found(CUT_SHORT + "rank 1 reported: ValueError: no", ranks=(1,)) is None
    assert found(NOT_WRITTEN, ranks=(0,)) == ("1", "rank 1 says: ValueError: no")
    assert found(NOT_WRITTEN, ranks=(1,)) is None
    assert found("rank 1 (pid 7 on this host): is stopped by a signal", ranks=(1,)) is None


@pytest.mark.parametrize("words", [LATE, CUT_SHORT + "rank 1 reported: ValueError: no"])
def test_of_ranks_that_are_processes_the_cause_goes_first_though_it_ends_last(words: str) -> None:
    first = f"import sys; print({words!r}); sys.exit(1)"
    later = "import sys, time; time.sleep(0.3); print('no'); sys.exit(4)"
    starts = [
        LaunchSpec(command=(sys.executable, "-c", program), ranks=(rank,))
        for rank, program in enumerate((first, later))
    ]

    report = supervise(starts, on_line=lambda line: None)

    assert report.exit_status == 1
    assert report.cause is not None
    assert report.cause.spec.ranks == (1,)
    text = str(report)
    assert text.startswith("rank 1 ended with exit code 4")
    assert "then rank 0 ended with exit code 1" in text
    assert "see the last error that rank 1 reported; others followed from it" in text


def test_what_a_rank_says_when_the_supervisor_ends_it_does_not_change_the_cause() -> None:
    fails = f"import sys; print({LATE!r}); sys.exit(1)"
    lost = CUT_SHORT + "rank 0 (pid 7 on this host) has ended"
    hangs = f"print({lost!r}, flush=True); import time; time.sleep(600)"
    starts = [
        LaunchSpec(command=(sys.executable, "-c", program), ranks=(rank,))
        for rank, program in enumerate((fails, hangs))
    ]

    report = supervise(starts, on_line=lambda line: None, grace_s=1.0)

    assert report.cause is not None
    assert (report.cause.spec.ranks, report.cause.code) == ((1,), None)


def test_ranks_that_name_each_other_are_told_as_they_ended() -> None:
    def program(other: int) -> str:
        words = f"could not complete: rank {other} reported: no"
        return f"import sys; print({words!r}); sys.exit(1)"

    starts = [
        LaunchSpec(command=(sys.executable, "-c", program(1 - rank)), ranks=(rank,))
        for rank in (0, 1)
    ]

    report = supervise(starts, on_line=lambda line: None)

    assert report.cause in report.exits


def test_the_message_of_a_launcher_names_the_rank_and_where_to_look() -> None:
    program = f"import sys; print({LATE!r}); sys.exit(3)"
    start = LaunchSpec(command=(sys.executable, "-c", program), ranks=(0, 1, 2))

    text = str(supervise([start], on_line=lambda line: None))

    assert text.startswith("ranks 0-2 ended with exit code 3")
    assert "rank 1 failed first: 'ranks that did not arrive: 1'" in text
    assert "see the last error that rank 1 reported; others followed from it" in text


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_with_status_0_in_the_middle_is_the_cause(end: str) -> None:
    text = (
        "import os, sys, time\n"
        f"if sys.argv[1] == '1': {end}\n"
        f"time.sleep(0.5); sys.exit({CUT_SHORT + 'rank 1 (pid 7 on this host) has ended'!r})"
    )
    specs = [
        LaunchSpec(command=(sys.executable, "-c", text, str(rank)), ranks=(rank,))
        for rank in (0, 1, 2)
    ]

    report = supervise(specs, on_line=lambda line: None)

    assert report.exit_status == 1
    assert str(report.error()).startswith("rank 1 ended with exit code 0, ")
    assert "before the other processes had ended" in str(report.error())


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals that stop")
def test_a_rank_that_is_stopped_when_all_others_have_ended_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_STOPPED_LOOKS", 1)
    text = "import os, signal, sys; sys.argv[1] == '1' and os.kill(os.getpid(), signal.SIGSTOP)"
    specs = [
        LaunchSpec(command=(sys.executable, "-c", text, str(rank)), ranks=(rank,))
        for rank in (0, 1)
    ]

    report = supervise(specs, on_line=lambda line: None)

    assert report.exit_status != 0
    assert str(report.error()).startswith("rank 1 had been stopped by a signal, ")
