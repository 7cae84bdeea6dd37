"""The failure detector: who ended, deregistered, fell silent or failed."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from boxing_calls import call_of, only_step
from dict_store import DictControlStore, elsewhere, lost, stores_of
from sleeping import ME, comes_to, member_of, sleeping

from sbp_core.processes import failure_detector as detector_module
from sbp_core.processes import membership as members_module
from sbp_core.processes.calls import Arrivals, PendingCalls
from sbp_core.processes.control_store import StoreSilentError
from sbp_core.processes.failure_detector import FailureDetector, awaited
from sbp_core.processes.membership import Member, MemberState
from sbp_core.processes.waiting import wait_until
from sbp_core.sbp import B

#: A process id of a process that is there, but started at another time: it has ended.
ENDED = replace(ME, rank=1, started=ME.started - 1)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping() as process:
        yield process


def detector_of(
    store: DictControlStore, *others: Member
) -> tuple[FailureDetector, PendingCalls, list[str]]:
    calls, learned = PendingCalls(), []
    members = {member.rank: member for member in (replace(ME, rank=store.rank), *others)}
    return FailureDetector(store, members, calls, learned.append), calls, learned


def test_the_detector_tells_of_a_collective_that_goes_on_while_the_rank_computes() -> None:
    store, other = stores_of(2)
    arrivals = Arrivals(store)
    number = arrivals.begin((0, 1))
    detector = FailureDetector(store, {0: ME}, PendingCalls(), print, arrivals)

    detector.start()
    try:
        told = other.wait_for(lambda: not other.not_waiting("0-1", number, (0, 1)), 10.0)
    finally:
        detector.stop()

    assert told


def test_nothing_is_wrong_while_all_run() -> None:
    store, _ = stores_of(2)
    detector, _, _ = detector_of(store, replace(ME, rank=1))

    assert detector.failure_reason() is None


def test_a_process_that_ended_without_deregistering_is_named() -> None:
    store, _ = stores_of(2)
    detector, _, _ = detector_of(store, ENDED)

    assert detector.failure_reason() == f"rank 1 (pid {ME.pid} on this host) has ended"


def test_a_process_that_deregistered_may_end() -> None:
    store, other = stores_of(2)
    detector, _, _ = detector_of(store, ENDED)

    other.deregister()

    assert detector.failure_reason() is None


def test_what_a_rank_told_before_it_ended_counts_more_than_its_end() -> None:
    store, other = stores_of(2)
    detector, _, _ = detector_of(store, ENDED)

    other.announce_failure("rank 1 reported: disk full")

    assert detector.failure_reason() == "rank 1 reported: disk full"


def test_what_a_rank_told_while_its_end_was_noticed_counts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, other = stores_of(2)
    detector, _, _ = detector_of(store, ENDED)

    def told_just_now(ranks: object) -> list[int]:
        other.announce_failure("rank 1 reported: disk full")
        return []

    monkeypatch.setattr(store, "deregistered", told_just_now)

    assert detector.failure_reason() == "rank 1 reported: disk full"


def test_with_the_host_of_the_store_gone_it_is_named_or_after_a_moment_the_loss() -> None:
    store, _ = stores_of(2)
    store.trouble = lost()
    ended, _, _ = detector_of(store, ENDED)
    unknown, _, _ = detector_of(store, elsewhere(1))

    assert ended.failure_reason() == f"rank 1 (pid {ME.pid} on this host) has ended"
    assert unknown.failure_reason() is None
    assert unknown.investigate(5.0) == "the store cannot be reached"


def test_a_rank_that_deregistered_while_a_call_waits_for_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detector_module, "_GRACE_S", 60.0)
    store, other, _ = stores_of(3)
    detector, calls, _ = detector_of(store, replace(ME, rank=1), replace(ME, rank=2))
    other.deregister()
    assert detector.failure_reason() is None

    calls.begin(call_of(age_s=1.0))
    assert detector.failure_reason() is None  # what it sent before may be on its way

    monkeypatch.setattr(detector_module, "_GRACE_S", 0.0)
    reason = detector.failure_reason() or ""
    assert reason.startswith("rank 1 ") and "closed its boxing backend" in reason
    calls.end()
    assert detector.failure_reason() is None


def stopped_looks(detector: FailureDetector, count: int) -> str:
    """Let a detector look so often; return what it says behind the last look."""
    reasons = [detector._find_stopped() for _ in range(count)]
    assert reasons[:-1] == [None] * (count - 1)
    return reasons[-1] or ""


def test_a_rank_that_stays_stopped_while_a_call_waits_for_it_is_named(
    sleeper: subprocess.Popen[bytes],
) -> None:
    store = stores_of(3)[0]
    other = member_of(sleeper)
    detector, calls, _ = detector_of(store, other, replace(ME, rank=2))
    sleeper.send_signal(signal.SIGSTOP)
    assert comes_to(other, MemberState.STOPPED)

    assert stopped_looks(detector, 60) == ""  # nobody waits for it
    calls.begin(call_of(age_s=0.0))
    assert stopped_looks(detector, 39) == ""
    calls.end()
    assert stopped_looks(detector, 1) == ""  # it was not waited for any more: counted anew
    calls.begin(call_of(age_s=0.0))
    reason = stopped_looks(detector, 40)

    named = f"rank 1 (pid {sleeper.pid} on this host)"
    assert reason == f"{named} is stopped by a signal, and has been for 10 s"


def test_a_rank_that_a_debugger_holds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    detector, calls, _ = detector_of(stores_of(2)[0], replace(ME, rank=1))
    monkeypatch.setattr(members_module, "status_of", lambda pid: ("t", 1, ME.started))
    calls.begin(call_of(age_s=0.0))

    assert stopped_looks(detector, 60) == ""
    assert detector.describe([1]) == [f"rank 1 (pid {ME.pid} on this host): is held by a debugger"]


def test_the_thread_looks_for_ranks_that_stay_stopped(
    monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(detector_module, "_STOPPED_LOOKS", 2)
    detector, calls, learned = detector_of(stores_of(2)[0], member_of(sleeper))
    sleeper.send_signal(signal.SIGSTOP)
    calls.begin(call_of(age_s=0.0))

    detector.start()
    try:
        told = wait_until(lambda: bool(learned), 20.0, first_pause_s=0.01, longest_pause_s=0.1)
    finally:
        detector.stop()

    assert told and "is stopped by a signal" in learned[0]


@pytest.mark.slow
def test_silence_on_another_host_counts_when_a_connection_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detector_module, "_SILENCE_S", 1.0)
    store, quiet, loud = stores_of(3)
    quiet.say("heartbeat", str(7), [0])
    detector, _, _ = detector_of(store, elsewhere(1), elsewhere(2))
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while not stop.wait(0.02):
            number += 1
            loud.say("heartbeat", str(number), [0])

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        reason = detector.investigate(0.0) or ""
        lines = detector.describe([1, 2])
    finally:
        stop.set()
        thread.join()

    assert reason.startswith("rank 1 (pid 1 on host far) has given no sign of life for 1 s")
    assert "no sign" in lines[0] and "gives signs of life" in lines[1]


def test_a_rank_is_described_by_what_its_process_does_and_where_it_was() -> None:
    store, other = stores_of(2)
    detector, _, _ = detector_of(store, replace(ME, rank=1))
    assert detector.describe([1]) == [f"rank 1 (pid {ME.pid} on this host): is running"]

    other.say("location", "waits in boxing step 'loss'")

    assert detector.describe([1])[0].endswith("is running; it waits in boxing step 'loss'")


def test_a_stopped_rank_is_described_too_though_nobody_asked_about_it(
    sleeper: subprocess.Popen[bytes],
) -> None:
    store, _, _ = stores_of(3)
    other = replace(member_of(sleeper), rank=2)
    detector, _, _ = detector_of(store, replace(ME, rank=1), other)
    assert len(detector.describe([1])) == 1

    sleeper.send_signal(signal.SIGSTOP)
    assert comes_to(other, MemberState.STOPPED)

    said = f"rank 2 (pid {sleeper.pid} on this host): is stopped by a signal"
    assert detector.describe([1])[1] == said


def test_the_thread_reports_where_a_long_call_waits_and_reads_of_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detector_module, "INTERVAL_S", 0.01)
    store, other = stores_of(2)
    detector, calls, learned = detector_of(store, replace(ME, rank=1))
    calls.begin(call_of(age_s=1.0))

    detector.start()
    assert store.wait_for(
        lambda: other.announced("location", 0) == "waits in boxing step 'grad'", 10.0
    )
    calls.end()
    assert store.wait_for(
        lambda: other.announced("location", 0) == "was last in boxing step 'grad'", 10.0
    )
    other.announce_failure("rank 1 reported: disk full")

    assert store.wait_for(lambda: bool(learned), 10.0)
    assert learned == ["rank 1 reported: disk full"]
    detector.stop()


def test_ranks_on_other_hosts_get_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector_module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(detector_module, "_HEARTBEAT_S", 0.02)
    store, other = stores_of(2)
    detector, _, _ = detector_of(store, elsewhere(1))

    detector.start()

    assert store.wait_for(lambda: int(other.announced("heartbeat", 0) or 0) >= 3, 10.0)
    detector.stop()
    assert not detector._thread.is_alive()


def test_a_receive_waits_for_its_senders_and_a_collective_for_its_group() -> None:
    transfer = only_step(B, B, [0, 3], [1, 2])

    assert awaited(call_of(rank=1)) == [0, 2]
    assert awaited(replace(call_of(rank=1), step=transfer)) == [0]
    assert awaited(replace(call_of(rank=0), step=transfer)) == []


def test_of_a_store_that_is_silent_whoever_is_stopped_is_named_and_not_who_has_ended(
    sleeper: subprocess.Popen[bytes],
) -> None:
    store, *_ = stores_of(3)
    detector, _, _ = detector_of(store, member_of(sleeper), replace(ENDED, rank=2))
    sleeper.send_signal(signal.SIGSTOP)
    assert comes_to(member_of(sleeper), MemberState.STOPPED)

    store.trouble = StoreSilentError("no answer")

    reason = detector.failure_reason() or ""
    assert reason.startswith("rank 1 (pid ") and "is stopped by a signal" in reason
