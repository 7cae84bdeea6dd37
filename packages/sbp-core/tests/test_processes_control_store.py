"""The control store: what ranks tell each other, and what is left of it once it is lost."""

from __future__ import annotations

from dataclasses import replace

from dict_store import elsewhere, lost, stores_of

from sbp_core.processes.control_store import StoreSilentError
from sbp_core.processes.membership import Member


def test_all_have_registered_once_each_has() -> None:
    here, there = stores_of(2)

    here.register(Member.of_this_process(0))
    assert not here.all_announced("member") and list(there.members()) == [0]
    there.register(elsewhere(1))

    assert here.all_announced("member")
    assert here.members() == {0: Member.of_this_process(0), 1: elsewhere(1)}


def test_ranks_that_have_not_joined_or_wait_in_an_earlier_call_are_known() -> None:
    stores = stores_of(3)
    stores[2].say("join/0-2")
    stores[0].say("waiting/0-1-2", str(5))
    stores[1].say("waiting/0-1-2", str(4))

    assert stores[0].not_joined("0-2", (0, 2)) == [0]
    assert stores[2].not_waiting("0-1-2", 5, (0, 1, 2)) == [1]
    assert stores[1].not_waiting("0-1-2", 5, (0, 1, 2)) == [2]


def test_the_first_failure_stays_and_long_ones_are_cut() -> None:
    here, there = stores_of(2)

    here.announce_failure("x" * 10_000)
    there.announce_failure("second")

    assert there.failure() == "x" * 2000


def test_who_has_deregistered_or_acknowledged_is_known() -> None:
    stores = stores_of(4)
    assert stores[0].deregistered(range(4)) == [] and stores[0].not_acknowledged(range(4)) == [
        1,
        2,
        3,
    ]

    stores[1].deregister()
    stores[2].say("acknowledged")

    assert stores[0].deregistered(range(4)) == [1]
    assert stores[0].not_acknowledged(range(4)) == [3]
    assert not stores[0].all_deregistered()
    for store in stores:
        store.deregister()
    assert stores[3].all_deregistered()


def test_locations_and_heartbeats_are_those_sent_last() -> None:
    here, there = stores_of(2)
    assert here.announced("location", 1) is None and here.announced("heartbeat", 1) is None

    for number in (1, 2):
        there.say("location", f"waits at {number}")
        there.say("heartbeat", str(number), [0])

    assert here.announced("location", 1) == "waits at 2" and here.announced("heartbeat", 1) == "2"


def test_a_lost_store_says_why_and_keeps_nobody_waiting() -> None:
    store, _ = stores_of(2)
    store.trouble = lost()

    store.announce_failure("too late")
    store.deregister()

    assert store.failure() == "the store cannot be reached" and store.is_lost()
    assert store.all_deregistered() and not store.all_announced("member")
    assert store.deregistered([0, 1]) == [] and store.announced("location", 1) is None


def test_a_silent_store_is_no_failure_and_names_who_cannot_have_come() -> None:
    stores = stores_of(3)
    me = Member.of_this_process(0)
    stores[0].register(me)
    stores[1].register(replace(me, rank=1))
    stores[2].register(replace(me, rank=2, started=me.started - 1))  # has ended
    stores[0].members()

    stores[0].trouble = StoreSilentError("no answer")

    assert stores[0].failure() is None and not stores[0].is_lost()
    assert not stores[0].all_deregistered()
    assert stores[0].not_joined("all", (0, 1, 2)) == [2]
    assert stores[0].not_waiting("all", 3, (0, 1)) == [1]


def test_an_entry_for_one_rank_is_read_once_and_then_deleted() -> None:
    here, there = stores_of(2)

    assert there.take("mail/0") is None
    here.publish("mail/0", "hello", [1])

    assert there.lookup("mail/0") == "hello"
    assert there.take("mail/0") == "hello"
    assert there.take("mail/0") is None
