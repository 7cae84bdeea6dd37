import time
from typing import Any

import pytest
import torch.distributed as dist

from sbp_boxing_torch.board import Board


@pytest.fixture
def boards() -> list[Board]:
    store: Any = dist.HashStore()
    return [Board(store, rank) for rank in range(3)]


class LostStore:
    def __getattr__(self, name: str) -> Any:
        def refuse(*args: object) -> None:
            raise RuntimeError("connection reset")

        return refuse


def test_ranks_that_have_not_joined_a_group_are_known(boards: list[Board]) -> None:
    boards[2].join("0-2")
    boards[1].join("0-1")

    assert boards[0].not_joined("0-2", (0, 2)) == [0]


def test_ranks_that_wait_at_an_earlier_call_have_not_come(boards: list[Board]) -> None:
    boards[0].wait_at("0-1-2", 5)
    boards[1].wait_at("0-1-2", 4)

    assert boards[2].not_waiting("0-1-2", 5, (0, 1, 2)) == [1]


def test_the_first_failure_is_what_all_ranks_are_told(boards: list[Board]) -> None:
    assert boards[0].failure() is None

    boards[2].announce("disk full")
    boards[1].announce("rank 2 is lost")

    assert boards[0].failure() == "rank 2 reported: disk full"


def test_all_have_left_once_each_has(boards: list[Board]) -> None:
    for board in boards[:2]:
        board.leave()
    assert not boards[0].all_left(range(3))

    boards[2].leave()

    assert boards[0].all_left(range(3))


def test_a_lost_store_is_a_failure_of_its_host_and_keeps_nobody() -> None:
    board = Board(LostStore(), 0)  # type: ignore[arg-type]

    board.join("0-1")
    board.announce("too late")

    assert "connection reset" in (board.failure() or "")
    assert board.all_left(range(2))
    assert board.not_joined("0-1", (0, 1)) == [0, 1]


def test_waiting_ends_when_the_time_is_over(boards: list[Board]) -> None:
    start = time.monotonic()

    came = boards[0].wait_for(lambda: False, 0.1)

    assert not came
    assert 0.1 <= time.monotonic() - start < 5
    assert boards[0].wait_for(lambda: True, 0.0)
