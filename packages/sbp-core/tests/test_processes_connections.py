"""What breaks when a rank has failed, who is told of it, and how connections are closed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from boxing_calls import call_of
from dict_store import DictControlStore, elsewhere, stores_of
from sleeping import ME, comes_to, member_of, sleeping

from sbp_core.errors import BoxingError
from sbp_core.processes import connections as connections_module
from sbp_core.processes import failure_detector as detector_module
from sbp_core.processes.connections import Connections
from sbp_core.processes.membership import Member, MemberState

#: A process id of a process that is there, but started at another time: it has ended.
ENDED = replace(ME, rank=1, started=ME.started - 1)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping() as process:
        yield process


class QuietConnections(Connections):
    def __init__(self, store: DictControlStore, limit_s: float = 10.0) -> None:
        super().__init__(store)
        self.told: list[str] = []
        self.rendezvous(limit_s)

    def _announce(self, text: str) -> None:
        self.told.append(text)
        self.control_store.announce_failure(text)

    def _release(self) -> None:
        self.control_store.deregister()


@pytest.fixture
def pair() -> Iterator[list[QuietConnections]]:
    stores = stores_of(2)
    stores[1].register(replace(ME, rank=1))
    first = QuietConnections(stores[0])
    second = QuietConnections(stores[1])
    yield [first, second]
    for each in (first, second):
        each.close()


def test_opening_in_vain_names_who_did_not_come() -> None:
    store, *_ = stores_of(3)
    store.entries["member/1"] = replace(ME, rank=1).to_json()

    with pytest.raises(BoxingError, match=r"rank 0 waited 0.05 s .*: 2\n"):
        QuietConnections(store, limit_s=0.05)


def test_opening_does_not_wait_for_the_ranks_of_a_run_that_lost_one() -> None:
    store, *_ = stores_of(3)
    store.entries["member/1"] = ENDED.to_json()

    with pytest.raises(BoxingError, match=r"ended before: ranks 1 \(pid") as caught:
        QuietConnections(store, limit_s=600.0)

    assert "did not open their boxing backend: 2" in str(caught.value)


def test_a_failure_reaches_ranks_that_are_in_no_call(pair: list[QuietConnections]) -> None:
    here, there = pair

    here.fail(ValueError("loss is not a number"))

    assert there.control_store.wait_for(lambda: there._failure is not None, 10.0)
    assert here.control_store.wait_for(
        lambda: not here.control_store.not_acknowledged([0, 1]), 10.0
    )
    with pytest.raises(BoxingError) as caught:
        there.check_usable(call_of(rank=1, tag="next"))
    said = "rank 0 reported: ValueError: loss is not a number"
    assert f"'next' could not complete: {said}" in str(caught.value)
    assert here.told == there.told == [said]


def test_a_broken_connection_is_explained_by_whoever_failed(
    pair: list[QuietConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "_REASON_S", 0.05)
    here, there = pair
    first = here.connection_lost(call_of(), "connection reset by peer")
    assert "'grad' could not complete: a rank has ended, or" in str(first)
    assert "connection reset by peer" in str(first)

    second = there.connection_lost(call_of(rank=1, tag="loss"), "broken pipe")

    assert "'loss' could not complete: a rank has ended, or" in str(second)
    assert "broken pipe" not in str(second)


def test_an_error_keeps_what_was_known_of_the_ranks_that_it_names(
    pair: list[QuietConnections],
) -> None:
    here, there = pair
    there.control_store.say("location", "waits in boxing step 'loss'")
    call = replace(call_of(), describe_ranks=here.describe_ranks)

    error = here.call_failed(call, call.missing([1]))
    # Another call that ends by it says what the first one advises.
    assert (
        "all processes must make the same calls" in here.call_failed(call, call.missing([1])).todo
    )

    line = f"rank 1 (pid {ME.pid} on this host): is running; it waits in boxing step 'loss'"
    assert line in error.where
    assert line in here.told[0] and here.told[0].startswith("rank 0 reported: ")


def test_closing_after_a_failure_waits_a_moment_for_the_others_to_acknowledge(
    pair: list[QuietConnections],
) -> None:
    here, there = pair
    here.fail(ValueError("loss is not a number"))

    here.close()

    assert there._failure is not None
    there.close()  # says nothing: whoever failed has said it


def test_closing_after_a_failure_does_not_wait_for_ever(
    pair: list[QuietConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    monkeypatch.setattr(connections_module, "_ACKNOWLEDGE_S", 0.3)
    assert there._detector is not None
    there._detector.stop()
    here.fail(ValueError("loss is not a number"))

    here.close()

    assert there._failure is None  # it has not read why, and never will


def test_a_program_that_ends_without_closing_says_so(pair: list[QuietConnections]) -> None:
    here, there = pair

    here.end_with_program(BoxingError("its program ended"))

    assert there.control_store.failure() == "rank 0 reported: its program ended"
    assert here._detector is not None and not here._detector._thread.is_alive()


class PatientConnections(QuietConnections):
    def _release(self) -> None:
        super()._release()
        self._await_others()


def closing_beside(other: Member) -> PatientConnections:
    store, *_ = stores_of(2)
    store.entries["member/1"] = other.to_json()
    return PatientConnections(store)


def test_closing_gives_up_a_rank_that_stays_stopped(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(detector_module, "INTERVAL_S", 0.05)
    other = member_of(sleeper)
    here = closing_beside(other)
    sleeper.send_signal(signal.SIGSTOP)
    assert comes_to(other, MemberState.STOPPED)

    with pytest.raises(BoxingError, match=r"could not complete: rank 1 \(.*\) is stopped by"):
        here.close()

    assert "rank 1" in (here.control_store.failure() or "")
    assert here._detector is not None and not here._detector._thread.is_alive()
    here.close()


def test_closing_does_not_harm_a_rank_that_is_slow(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "CLOSE_TIMEOUT_S", 0.1)
    here = closing_beside(member_of(sleeper))

    here.close()

    assert here.control_store.failure() is None


def test_closing_gives_up_a_rank_that_has_ended_and_had_not_closed() -> None:
    here = closing_beside(ENDED)

    with pytest.raises(BoxingError, match=r"could not complete: rank 1 \(.*\) has ended"):
        here.close()


def test_closing_gives_up_a_rank_of_another_host_that_gives_no_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections_module, "CLOSE_TIMEOUT_S", 0.1)
    here = closing_beside(elsewhere(1))

    with pytest.raises(BoxingError, match=r"rank 1 \(.* host far\) has given no sign of life"):
        here.close()
