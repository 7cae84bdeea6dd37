import threading
from typing import Any

import pytest
import torch.distributed as dist

from sbp_core.boxing.processes import store_client as notes
from sbp_core.boxing.processes.control_store import BoardSilentError
from sbp_core.boxing.processes.store_client import StoreBoard


@pytest.fixture
def boards() -> list[StoreBoard]:
    store: Any = dist.HashStore()
    return [StoreBoard(store, rank, 3) for rank in range(3)]


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


def test_notes_are_read_by_all_and_the_last_of_a_key_counts(boards: list[StoreBoard]) -> None:
    boards[2].join("0-2")
    boards[1].join("0-1")
    for number in (4, 5):
        boards[0].wait_at("0-1-2", number)

    assert boards[0].not_joined("0-2", (0, 2)) == [0]
    assert boards[2].not_waiting("0-1-2", 5, (0, 1, 2)) == [1]


def test_the_first_failure_is_what_all_ranks_are_told(boards: list[StoreBoard]) -> None:
    assert boards[0].failure() is None

    boards[2].announce("disk full")
    boards[1].announce("rank 2 is lost")

    assert boards[0].failure() == "disk full"


def test_of_two_failures_at_the_same_time_one_stays(boards: list[StoreBoard]) -> None:
    for board in boards:
        board._put("failure", f"rank {board.rank} failed", range(3))

    assert {board.failure() for board in boards} == {"rank 0 failed"}


def test_all_have_left_once_each_has(boards: list[StoreBoard]) -> None:
    for board in boards[:2]:
        board.leave()
    assert not boards[0].all_left()

    boards[2].leave()

    assert boards[0].all_left()


def test_a_lost_store_is_a_failure_and_is_not_asked_again() -> None:
    store = LostStore()
    board = StoreBoard(store, 0, 2)  # type: ignore[arg-type]

    assert "connection reset" in (board.failure() or "")
    board.announce("too late")
    assert board.is_lost()
    assert board.all_left()
    assert board.not_joined("0-1", (0, 1)) == [1]
    assert store.num_asked == 1


def test_a_store_that_does_not_answer_keeps_nobody_waiting_and_may_answer_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes, "_LIMIT_S", 0.05)
    store = StoppedStore()
    board = StoreBoard(store, 0, 2)  # type: ignore[arg-type]

    with pytest.raises(BoardSilentError, match="has not answered"):
        board._get("failure")
    assert board.failure() is None and not board.is_lost()
    assert not board.all_left()
    store.goes_on.set()
    assert board.wait_for(lambda: board._clerk._unanswered_since is None, 30.0)
    assert board._get("failure") is None
    board.close()
