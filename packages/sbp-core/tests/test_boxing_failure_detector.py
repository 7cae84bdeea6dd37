"""The watch: who ended, left, fell silent or told of a failure; and what then breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from dict_store import DictBoard, boards_of, elsewhere, lost

from sbp_core.boxing.processes import connections as connections_module
from sbp_core.boxing.processes import failure_detector as watch_module
from sbp_core.boxing.processes.call import CollectiveCall
from sbp_core.boxing.processes.connections import Connections
from sbp_core.boxing.processes.failure_detector import Calls, FailureDetector, awaited
from sbp_core.boxing.processes.membership import Member
from sbp_core.boxing.router import route
from sbp_core.boxing.step import Step
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, Sbp

ME = Member.of_this_process(0)
#: A process id of a process that is there, but started at another time: it has ended.
ENDED = replace(ME, rank=1, started=ME.started - 1)


def only_step(before: Sbp, after: Sbp, sources: list[int], targets: list[int]) -> Step:
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route((4, 2), "float32", (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def call_of(age_s: float = 0.0, rank: int = 0, tag: str = "grad") -> CollectiveCall:
    step = only_step(P, B, [0, 1, 2], [0, 1, 2])
    return CollectiveCall(
        step=step, tag=tag, rank=rank, deadline_s=60.0, end_s=time.monotonic() - age_s + 60.0
    )


def watch_of(board: DictBoard, *others: Member) -> tuple[FailureDetector, Calls, list[str]]:
    calls, learned = Calls(), []
    members = {member.rank: member for member in (replace(ME, rank=board.rank), *others)}
    return FailureDetector(board, members, calls, learned.append), calls, learned


def test_nothing_is_wrong_while_all_run() -> None:
    board, _ = boards_of(2)
    watch, _, _ = watch_of(board, replace(ME, rank=1))

    assert watch.reason() is None


def test_a_process_that_ended_without_leaving_is_named() -> None:
    board, _ = boards_of(2)
    watch, _, _ = watch_of(board, ENDED)

    assert watch.reason() == f"rank 1 (pid {ME.pid} on this host) has ended"


def test_a_process_that_left_may_end() -> None:
    board, other = boards_of(2)
    watch, _, _ = watch_of(board, ENDED)

    other.leave()

    assert watch.reason() is None


def test_what_a_rank_told_before_it_ended_counts_more_than_its_end() -> None:
    board, other = boards_of(2)
    watch, _, _ = watch_of(board, ENDED)

    other.announce("rank 1 reported: disk full")

    assert watch.reason() == "rank 1 reported: disk full"


def test_what_a_rank_told_while_its_end_was_noticed_counts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board, other = boards_of(2)
    watch, _, _ = watch_of(board, ENDED)

    def told_just_now(ranks: object) -> list[int]:
        other.announce("rank 1 reported: disk full")
        return []

    monkeypatch.setattr(board, "left", told_just_now)

    assert watch.reason() == "rank 1 reported: disk full"


def test_with_the_keeper_of_the_notes_gone_it_is_named_or_after_a_moment_the_loss() -> None:
    board, _ = boards_of(2)
    board.trouble = lost()
    ended, _, _ = watch_of(board, ENDED)
    unknown, _, _ = watch_of(board, elsewhere(1))

    assert ended.reason() == f"rank 1 (pid {ME.pid} on this host) has ended"
    assert unknown.reason() is None
    assert unknown.find(5.0) == "the store cannot be reached"


def test_a_rank_that_left_while_a_call_waits_for_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "_GRACE_S", 0.05)
    board, other, _ = boards_of(3)
    watch, calls, _ = watch_of(board, replace(ME, rank=1), replace(ME, rank=2))
    other.leave()
    assert watch.reason() is None

    calls.begin(call_of(age_s=1.0))
    assert watch.reason() is None  # what it sent before may be on its way
    time.sleep(0.06)

    reason = watch.reason() or ""
    assert reason.startswith("rank 1 ") and "closed its boxing backend" in reason
    calls.end()
    assert watch.reason() is None


def test_silence_on_another_host_counts_when_a_connection_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "_SILENCE_S", 0.2)
    board, quiet, loud = boards_of(3)
    quiet.beat(7, [0])
    watch, _, _ = watch_of(board, elsewhere(1), elsewhere(2))
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while not stop.wait(0.02):
            number += 1
            loud.beat(number, [0])

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        reason = watch.find(0.0) or ""
        lines = watch.witness([1, 2])
    finally:
        stop.set()
        thread.join()

    assert reason.startswith("rank 1 (pid 1 on host far) has given no sign of life for 0.2 s")
    assert "no sign" in lines[0] and "gives signs of life" in lines[1]


def test_a_witness_says_what_a_process_does_and_where_it_was() -> None:
    board, other = boards_of(2)
    watch, _, _ = watch_of(board, replace(ME, rank=1))
    assert watch.witness([1]) == [f"rank 1 (pid {ME.pid} on this host): is running"]

    other.come_to("waits in boxing step 'loss'")

    assert watch.witness([1])[0].endswith("is running; it waits in boxing step 'loss'")


def test_a_witness_also_names_a_stopped_rank_that_it_was_not_asked_about() -> None:
    board, _, _ = boards_of(3)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        watch, _, _ = watch_of(
            board, replace(ME, rank=1), replace(ME, rank=2, pid=sleeper.pid, started=0)
        )
        assert len(watch.witness([1])) == 1

        os.kill(sleeper.pid, signal.SIGSTOP)
        assert board.wait_for(lambda: len(watch.witness([1])) == 2, 10.0)

        said = f"rank 2 (pid {sleeper.pid} on this host): is stopped by a signal"
        assert watch.witness([1])[1] == said
    finally:
        sleeper.kill()
        sleeper.wait()


def test_the_thread_notes_where_a_long_call_waits_and_learns_of_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.01)
    board, other = boards_of(2)
    watch, calls, learned = watch_of(board, replace(ME, rank=1))
    calls.begin(call_of(age_s=1.0))

    watch.start()
    assert board.wait_for(lambda: other.last_seen(0) == "waits in boxing step 'grad'", 10.0)
    calls.end()
    assert board.wait_for(lambda: other.last_seen(0) == "was last in boxing step 'grad'", 10.0)
    other.announce("rank 1 reported: disk full")

    assert board.wait_for(lambda: bool(learned), 10.0)
    assert learned == ["rank 1 reported: disk full"]
    watch.stop()


def test_ranks_on_other_hosts_get_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(watch_module, "_BEAT_S", 0.02)
    board, other = boards_of(2)
    watch, _, _ = watch_of(board, elsewhere(1))

    watch.start()

    assert board.wait_for(lambda: int(other.last_beat(0) or 0) >= 3, 10.0)
    watch.stop()
    assert not watch._thread.is_alive()


def test_a_receive_waits_for_its_senders_and_a_collective_for_its_group() -> None:
    transfer = only_step(B, B, [0, 3], [1, 2])

    assert awaited(call_of(rank=1)) == [0, 2]
    assert awaited(replace(call_of(rank=1), step=transfer)) == [0]
    assert awaited(replace(call_of(rank=0), step=transfer)) == []


# What breaks then.


class QuietConnections(Connections):
    def __init__(self, board: DictBoard, limit_s: float = 10.0) -> None:
        super().__init__()
        self.told: list[str] = []
        self.board = board
        self.watch_over(board, limit_s)

    def _announce(self, text: str) -> None:
        self.told.append(text)
        self.board.announce(text)

    def _release(self) -> None:
        self.board.leave()


@pytest.fixture
def pair() -> Iterator[list[QuietConnections]]:
    boards = boards_of(2)
    boards[1].register(replace(ME, rank=1))
    first = QuietConnections(boards[0])
    second = QuietConnections(boards[1])
    yield [first, second]
    for each in (first, second):
        each.close()


def test_opening_in_vain_names_who_did_not_come() -> None:
    board, *_ = boards_of(3)
    board.notes["member/1"] = replace(ME, rank=1).to_json()

    with pytest.raises(BoxingError, match=r"rank 0 waited 0.05 s .*: 2\n"):
        QuietConnections(board, limit_s=0.05)


def test_opening_does_not_wait_for_the_ranks_of_a_run_that_lost_one() -> None:
    board, *_ = boards_of(3)
    board.notes["member/1"] = ENDED.to_json()
    start = time.monotonic()

    with pytest.raises(BoxingError, match=r"ended before: ranks 1 \(pid") as caught:
        QuietConnections(board, limit_s=60.0)

    assert time.monotonic() - start < 10.0
    assert "did not open their boxing backend: 2" in str(caught.value)


def test_a_failure_reaches_ranks_that_are_in_no_call(pair: list[QuietConnections]) -> None:
    here, there = pair

    here.fail(ValueError("loss is not a number"))

    assert there.board.wait_for(lambda: there._failure is not None, 10.0)
    assert here.board.wait_for(lambda: not here.board.not_heard([0, 1]), 10.0)
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
    first = here.lost(call_of(), "connection reset by peer")
    assert "'grad' could not complete: a rank has ended, or" in str(first)
    assert "connection reset by peer" in str(first)

    second = there.lost(call_of(rank=1, tag="loss"), "broken pipe")

    assert "'loss' could not complete: a rank has ended, or" in str(second)
    assert "broken pipe" not in str(second)


def test_an_error_keeps_what_was_known_of_the_ranks_that_it_names(
    pair: list[QuietConnections],
) -> None:
    here, there = pair
    there.board.come_to("waits in boxing step 'loss'")
    call = replace(call_of(), witness=here.witness)

    error = here.broken(call, call.missing([1]))

    line = f"rank 1 (pid {ME.pid} on this host): is running; it waits in boxing step 'loss'"
    assert line in error.where
    assert line in here.told[0] and here.told[0].startswith("rank 0 reported: ")


def test_closing_after_a_failure_waits_a_moment_for_the_others_to_hear(
    pair: list[QuietConnections],
) -> None:
    here, there = pair
    here.fail(ValueError("loss is not a number"))

    here.close()

    assert there._failure is not None


def test_closing_after_a_failure_does_not_wait_for_ever(
    pair: list[QuietConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    monkeypatch.setattr(connections_module, "_NEWS_S", 0.3)
    assert there._watch is not None
    there._watch.stop()
    here.fail(ValueError("loss is not a number"))
    start = time.monotonic()

    here.close()

    assert time.monotonic() - start >= 0.3
    assert there._failure is None  # it has not heard, and never will


def test_a_program_that_ends_without_closing_says_so(pair: list[QuietConnections]) -> None:
    here, there = pair

    here.end_with_program(BoxingError("its program ended"))

    assert there.board.failure() == "rank 0 reported: its program ended"
    assert here._watch is not None and not here._watch._thread.is_alive()
