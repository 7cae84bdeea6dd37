"""The board: what ranks tell each other, and what is left of it when nobody keeps the notes."""

from __future__ import annotations

from dataclasses import replace

from dict_store import boards_of, elsewhere, lost

from sbp_core.boxing.processes.control_store import StoreSilentError
from sbp_core.boxing.processes.membership import Member


def test_all_have_enlisted_once_each_has() -> None:
    here, there = boards_of(2)

    here.register(Member.of_this_process(0))
    assert not here.all_enlisted() and list(there.members()) == [0]
    there.register(elsewhere(1))

    assert here.all_enlisted()
    assert here.members() == {0: Member.of_this_process(0), 1: elsewhere(1)}


def test_ranks_that_have_not_joined_or_wait_at_an_earlier_call_are_known() -> None:
    boards = boards_of(3)
    boards[2].join("0-2")
    boards[0].wait_at("0-1-2", 5)
    boards[1].wait_at("0-1-2", 4)

    assert boards[0].not_joined("0-2", (0, 2)) == [0]
    assert boards[2].not_waiting("0-1-2", 5, (0, 1, 2)) == [1]
    assert boards[1].not_waiting("0-1-2", 5, (0, 1, 2)) == [2]


def test_the_first_failure_stays_and_long_ones_are_cut() -> None:
    here, there = boards_of(2)

    here.announce("x" * 10_000)
    there.announce("second")

    assert there.failure() == "x" * 2000


def test_who_has_left_or_heard_is_known() -> None:
    boards = boards_of(4)
    assert boards[0].left(range(4)) == [] and boards[0].not_heard(range(4)) == [1, 2, 3]

    boards[1].leave()
    boards[2].hear()

    assert boards[0].left(range(4)) == [1]
    assert boards[0].not_heard(range(4)) == [3]
    assert not boards[0].all_left()
    for board in boards:
        board.leave()
    assert boards[3].all_left()


def test_places_and_beats_are_those_told_last() -> None:
    here, there = boards_of(2)
    assert here.last_seen(1) is None and here.last_beat(1) is None

    for number in (1, 2):
        there.come_to(f"waits at {number}")
        there.beat(number, [0])

    assert here.last_seen(1) == "waits at 2" and here.last_beat(1) == "2"


def test_a_lost_board_says_why_and_keeps_nobody() -> None:
    board, _ = boards_of(2)
    board.trouble = lost()

    board.announce("too late")
    board.leave()

    assert board.failure() == "the store cannot be reached" and board.is_lost()
    assert board.all_left() and not board.all_enlisted()
    assert board.left([0, 1]) == [] and board.last_seen(1) is None


def test_a_silent_board_is_no_failure_and_names_who_cannot_have_come() -> None:
    boards = boards_of(3)
    me = Member.of_this_process(0)
    boards[0].register(me)
    boards[1].register(replace(me, rank=1))
    boards[2].register(replace(me, rank=2, started=me.started - 1))  # has ended
    boards[0].members()

    boards[0].trouble = StoreSilentError("no answer")

    assert boards[0].failure() is None and not boards[0].is_lost()
    assert not boards[0].all_left()
    assert boards[0].not_joined("all", (0, 1, 2)) == [2]
    assert boards[0].not_waiting("all", 3, (0, 1)) == [1]
