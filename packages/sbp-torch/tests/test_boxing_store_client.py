import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from sbp_core.boxing.processes import store_client as notes
from sbp_core.boxing.processes.control_store import StoreSilentError
from sbp_core.boxing.processes.membership import Member
from sbp_core.boxing.processes.store_client import KeyValueControlStore


@pytest.fixture
def boards() -> Iterator[list[KeyValueControlStore]]:
    store: Any = dist.HashStore()
    found = [KeyValueControlStore(store, rank, 3) for rank in range(3)]
    yield found
    for board in found:
        board.close()


class LostStore:
    def __init__(self) -> None:
        self.num_asked = 0

    def check(self, keys: object) -> bool:
        self.num_asked += 1
        raise RuntimeError("connection reset")


class StoppedStore:
    """Answers no question until it is told to go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def check(self, keys: object) -> bool:
        self.goes_on.wait(30)
        return False

    def set(self, key: str, value: str) -> None:
        self.goes_on.wait(30)


def test_notes_are_read_by_all_and_the_last_of_a_key_counts(
    boards: list[KeyValueControlStore],
) -> None:
    boards[2].join("0-2")
    boards[1].join("0-1")
    for number in (4, 5):
        boards[0].wait_at("0-1-2", number)

    assert boards[0].not_joined("0-2", (0, 2)) == [0]
    assert boards[2].not_waiting("0-1-2", 5, (0, 1, 2)) == [1]


def test_the_first_failure_is_what_all_ranks_are_told(boards: list[KeyValueControlStore]) -> None:
    assert boards[0].failure() is None

    boards[2].announce("disk full")
    boards[1].announce("rank 2 is lost")

    assert boards[0].failure() == "disk full"


def test_of_two_failures_at_the_same_time_one_stays(boards: list[KeyValueControlStore]) -> None:
    for board in boards:
        board._put("failure", f"rank {board.rank} failed", range(3))

    assert {board.failure() for board in boards} == {"rank 0 failed"}


def test_all_have_left_once_each_has(boards: list[KeyValueControlStore]) -> None:
    for board in boards[:2]:
        board.leave()
    assert not boards[0].all_left()

    boards[2].leave()

    assert boards[0].all_left()


def test_a_lost_store_is_a_failure_and_is_not_asked_again() -> None:
    store = LostStore()
    board = KeyValueControlStore(store, 0, 2)  # type: ignore[arg-type]

    assert "connection reset" in (board.failure() or "")
    board.announce("too late")
    assert board.is_lost()
    assert board.all_left()
    assert board.not_joined("0-1", (0, 1)) == [1]
    board.close()
    assert store.num_asked == 1


def test_a_store_that_does_not_answer_keeps_nobody_waiting_and_may_answer_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes, "_LIMIT_S", 0.05)
    store = StoppedStore()
    board = KeyValueControlStore(store, 0, 2)  # type: ignore[arg-type]

    with pytest.raises(StoreSilentError, match="has not answered"):
        board._get("failure")
    assert board.failure() is None and not board.is_lost()
    assert not board.all_left()
    store.goes_on.set()
    assert board.wait_for(lambda: board._clerk._unanswered_since is None, 30.0)
    assert board._get("failure") is None
    board.close()


def clerks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sbp-clerk"]


def test_a_closed_board_holds_neither_a_thread_nor_its_store() -> None:
    store: Any = dist.HashStore()
    lives = weakref.ref(store)
    before, board = clerks(), KeyValueControlStore(store, 1, 2)
    board.register(Member.of_this_process(1))
    del store

    board.close()
    board.close()

    assert clerks() == before
    assert lives() is None
    began = time.monotonic()
    assert board.failure() is None and not board.is_lost() and not board.all_left()
    assert time.monotonic() - began < 0.5


def test_rank_0_closes_after_all_others_have() -> None:
    store: Any = dist.HashStore()
    first, other = (KeyValueControlStore(store, rank, 2) for rank in range(2))
    for board in (first, other):
        board.leave()
    closing = threading.Thread(target=first.close)

    closing.start()
    time.sleep(0.2)
    waits = closing.is_alive()
    other.close()
    closing.join(0.5)

    assert waits and not closing.is_alive()


def test_a_board_whose_store_does_not_answer_is_closed_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes, "_LIMIT_S", 0.05)
    store = StoppedStore()
    board = KeyValueControlStore(store, 0, 2)  # type: ignore[arg-type]
    assert board.failure() is None

    began = time.monotonic()
    board.close()

    assert time.monotonic() - began < 1.0
    store.goes_on.set()


class Meetings:
    """Stores at one address, as rank 1 finds them: an old one, and then that of this meeting.

    Args:
        num_looks: How often rank 1 finds the old one until it ends.
    """

    def __init__(self, num_looks: int) -> None:
        self.num_looks, self.num_connects = num_looks, 0

    def connect(self) -> Any:
        self.num_connects += 1
        if self.num_connects > 1:
            return Counters({})
        return Counters({"x/opened/0": 1, "x/opened/1": 1}, self.num_looks)


class Counters:
    def __init__(self, values: dict[str, int], num_looks: int = 1000) -> None:
        self.values, self._num_left = values, num_looks

    def add(self, key: str, amount: int) -> int:
        self._num_left -= 1
        if self._num_left < 0:
            raise RuntimeError("connection reset by peer")
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]


@pytest.mark.parametrize("num_looks", [0, 1, 5])
def test_a_rank_that_meets_again_does_not_stay_in_a_store_that_ends(num_looks: int) -> None:
    meetings = Meetings(num_looks)

    store = notes.meet_anew(meetings.connect, "x", 1, 10.0)

    assert meetings.num_connects == 2
    assert notes.count_opening(store, "x", 1) == 1


def test_a_rank_that_meets_again_stays_where_rank_0_comes_back_to() -> None:
    store = Counters({"x/opened/0": 1, "x/opened/1": 1})
    timer = threading.Timer(0.2, notes.count_opening, (store, "x", 0))
    timer.start()

    found: Any = notes.meet_anew(lambda: store, "x", 1, 10.0)  # type: ignore[arg-type,return-value]

    timer.join()
    assert found is store
    assert notes.count_opening(found, "x", 1) == 2


def test_ranks_that_meet_for_the_first_time_and_rank_0_wait_for_nobody() -> None:
    began = time.monotonic()

    for rank, values in ((1, {"x/opened/0": 0}), (0, {"x/opened/0": 3})):
        store = Counters(dict(values))
        assert notes.meet_anew(lambda store=store: store, "x", rank, 10.0) is store  # type: ignore[misc,type-var]

    assert time.monotonic() - began < 1.0
