"""The processes that are left agree on who they are, and hear each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from dict_store import DictControlStore, elsewhere, lost, stores_of

from sbp_core.errors import BoxingError
from sbp_core.processes import survivors
from sbp_core.processes.control_store import StoreSilentError
from sbp_core.processes.membership import Member
from sbp_core.processes.survivors import Survivors

T = TypeVar("T")


def ended(rank: int) -> Member:
    """Return a process of this host that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    here = Member.of_this_process(rank)
    return Member(
        rank=rank,
        host=here.host,
        pid_namespace=here.pid_namespace,
        pid=process.pid,
        started=here.started + 1,
    )


def run_with(size: int, *gone: Member) -> list[DictControlStore]:
    """Return the stores of the ranks that are left."""
    stores = stores_of(size)
    others = {member.rank: member for member in gone}
    for rank, store in enumerate(stores):
        store.register(others.get(rank, Member.of_this_process(rank)))
    return [store for store in stores if store.rank not in others]


def on_each(stores: list[DictControlStore], action: Callable[[DictControlStore], T]) -> list[T]:
    with ThreadPoolExecutor(len(stores)) as pool:
        return [future.result(20.0) for future in [pool.submit(action, one) for one in stores]]


def test_those_that_are_left_know_each_other_and_hear_each_other() -> None:
    stores = run_with(4, ended(1))

    def talk(store: DictControlStore) -> tuple[tuple[int, ...], list[str], list[str]]:
        left = Survivors.agree(store, 20.0)
        return (
            left.ranks,
            left.gather(f"I am {store.rank}", 20.0),
            left.gather("", 20.0),
        )

    assert on_each(stores, talk) == [((0, 2, 3), ["I am 0", "I am 2", "I am 3"], ["", "", ""])] * 3


def test_a_rank_that_is_not_seen_is_waited_for_until_the_time_is_over() -> None:
    stores = run_with(3, elsewhere(2))

    ranks = on_each(stores, lambda store: Survivors.agree(store, 0.5).ranks)

    assert ranks == [(0, 1), (0, 1)]


def test_what_the_first_has_seen_counts_and_who_comes_late_is_left_out() -> None:
    first, late = run_with(2)
    assert Survivors.agree(first, 0.0).ranks == (0,)

    with pytest.raises(BoxingError, match=r"rank 1 cannot reach .*\[0\] did not wait for it"):
        Survivors.agree(late, 20.0)


def test_a_rank_that_has_left_the_run_is_not_waited_for() -> None:
    here, there = run_with(2)
    there.deregister()

    assert Survivors.agree(here, 600.0).ranks == (0,)


def test_one_that_ends_too_or_does_not_come_is_named() -> None:
    here, there = run_with(2)
    left = on_each([here, there], lambda store: Survivors.agree(store, 20.0))[0]

    with pytest.raises(BoxingError, match="of the surviving ranks, 1 did not continue"):
        left.gather("step 3", 0.1)
    here._members[1] = ended(1)
    with pytest.raises(BoxingError, match="1 did not continue"):
        left.gather("step 3", 600.0)


def test_without_the_store_a_rank_is_alone_and_waits_for_nobody() -> None:
    here, _ = run_with(2)
    here.members()
    here.trouble = lost()

    left = Survivors.agree(here, 600.0)

    assert left.ranks == (0,)
    assert left.gather("step 3", 600.0) == ["step 3"]
    left.leave()


def test_a_store_that_is_silent_while_its_host_stands_still_is_not_waited_for() -> None:
    here, _ = run_with(2)
    here.members()
    here.trouble = StoreSilentError("no answer")

    with pytest.raises(BoxingError, match="cannot reach the other surviving ranks"):
        Survivors.agree(here, 0.1)  # it may answer yet
    here._members[1] = ended(1)
    with pytest.raises(BoxingError, match="cannot reach the other surviving ranks"):
        Survivors.agree(here, 600.0)


def test_the_host_of_the_store_stays_until_its_last_words_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(survivors, "_LEAVE_S", 600.0)
    here, there = run_with(2)
    left = on_each([here, there], lambda store: Survivors.agree(store, 20.0))

    with ThreadPoolExecutor(1) as pool:
        leaves = pool.submit(left[0].leave)
        assert not leaves.done()
        left[1].leave()
        leaves.result(20.0)
