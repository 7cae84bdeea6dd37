import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from sbp_core.processes import key_value_store as client_module
from sbp_core.processes.control_store import StoreSilentError
from sbp_core.processes.key_value_store import KeyValueControlStore
from sbp_core.processes.membership import Member


@pytest.fixture
def control_stores() -> Iterator[list[KeyValueControlStore]]:
    store: Any = dist.HashStore()
    found = [KeyValueControlStore(store, rank, 3) for rank in range(3)]
    yield found
    for control_store in found:
        control_store.close()


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


def test_entries_are_read_by_all_and_the_last_of_a_key_counts(
    control_stores: list[KeyValueControlStore],
) -> None:
    control_stores[2].say("join/0-2")
    control_stores[1].say("join/0-1")
    for number in (4, 5):
        control_stores[0].say("waiting/0-1-2", str(number))

    assert control_stores[0].not_joined("0-2", (0, 2)) == [0]
    assert control_stores[2].not_waiting("0-1-2", 5, (0, 1, 2)) == [1]


def test_the_first_failure_is_what_all_ranks_are_told(
    control_stores: list[KeyValueControlStore],
) -> None:
    assert control_stores[0].failure() is None

    control_stores[2].announce_failure("disk full")
    control_stores[1].announce_failure("rank 2 is lost")

    assert control_stores[0].failure() == "disk full"


def test_of_two_failures_at_the_same_time_one_stays(
    control_stores: list[KeyValueControlStore],
) -> None:
    for control_store in control_stores:
        control_store._put("failure", f"rank {control_store.rank} failed", range(3))

    assert {control_store.failure() for control_store in control_stores} == {"rank 0 failed"}


@pytest.mark.slow
def test_all_have_deregistered_once_each_has(control_stores: list[KeyValueControlStore]) -> None:
    for control_store in control_stores[:2]:
        control_store.deregister()
    assert not control_stores[0].all_deregistered()

    control_stores[2].deregister()

    assert control_stores[0].all_deregistered()


def test_a_lost_store_is_a_failure_and_is_not_asked_again() -> None:
    store = LostStore()
    control_store = KeyValueControlStore(store, 0, 2)  # type: ignore[arg-type]

    assert "connection reset" in (control_store.failure() or "")
    control_store.announce_failure("too late")
    assert control_store.is_lost()
    assert control_store.all_deregistered()
    assert control_store.not_joined("0-1", (0, 1)) == [1]
    control_store.close()
    assert store.num_asked == 1


def test_a_store_that_does_not_answer_keeps_nobody_waiting_and_may_answer_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_LIMIT_S", 0.05)
    store = StoppedStore()
    control_store = KeyValueControlStore(store, 0, 2)  # type: ignore[arg-type]

    with pytest.raises(StoreSilentError, match="has not answered"):
        control_store._get("failure")
    assert control_store.failure() is None and not control_store.is_lost()
    assert not control_store.all_deregistered()
    store.goes_on.set()
    assert control_store.wait_for(lambda: control_store._client._unanswered_since is None, 30.0)
    assert control_store._get("failure") is None
    control_store.close()


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sbp-store-client"]


def test_a_closed_control_store_holds_neither_a_thread_nor_its_store() -> None:
    store: Any = dist.HashStore()
    lives = weakref.ref(store)
    before, control_store = client_threads(), KeyValueControlStore(store, 1, 2)
    control_store.register(Member.of_this_process(1))
    del store

    control_store.close()
    control_store.close()

    assert client_threads() == before
    assert lives() is None
    assert (
        control_store.failure() is None
        and not control_store.is_lost()
        and not control_store.all_deregistered()
    )


def test_rank_0_closes_after_all_others_have() -> None:
    store: Any = dist.HashStore()
    first, other = (KeyValueControlStore(store, rank, 2) for rank in range(2))
    for control_store in (first, other):
        control_store.deregister()
    closing = threading.Thread(target=first.close)

    closing.start()
    time.sleep(0.2)
    waits = closing.is_alive()
    other.close()
    closing.join(30.0)

    assert waits and not closing.is_alive()


def test_a_control_store_whose_host_does_not_answer_is_closed_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_LIMIT_S", 0.05)
    store = StoppedStore()
    control_store = KeyValueControlStore(store, 0, 2)  # type: ignore[arg-type]
    assert control_store.failure() is None

    control_store.close()

    store.goes_on.set()


class StoresInTurn:
    """Stores at one address, as rank 1 finds them: an old one, and then that of this run.

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
def test_a_rank_that_comes_again_does_not_stay_in_a_store_that_ends(num_looks: int) -> None:
    stores = StoresInTurn(num_looks)

    store = client_module.connect_current_store(stores.connect, "x", 1, 10.0)

    assert stores.num_connects == 2
    assert client_module.count_opening(store, "x", 1) == 1


def test_a_rank_whose_connection_breaks_while_it_is_made_connects_again() -> None:
    answers: Any = iter([RuntimeError("failed to recv, got 0 bytes"), Counters({})])

    def connect() -> Any:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    assert isinstance(client_module.connect_current_store(connect, "x", 1, 10.0), Counters)


def test_rank_0_does_not_wait_where_it_cannot_host() -> None:
    def connect() -> Any:
        raise RuntimeError("address already in use")

    with pytest.raises(RuntimeError, match="in use"):
        client_module.connect_current_store(connect, "x", 0, 600.0)


def test_a_rank_that_comes_again_stays_where_rank_0_comes_back_to() -> None:
    store = Counters({"x/opened/0": 1, "x/opened/1": 1})
    timer = threading.Timer(0.2, client_module.count_opening, (store, "x", 0))
    timer.start()

    found: Any = client_module.connect_current_store(lambda: store, "x", 1, 10.0)  # type: ignore[arg-type,return-value]

    timer.join()
    assert found is store
    assert client_module.count_opening(found, "x", 1) == 2


def test_ranks_that_come_for_the_first_time_and_rank_0_wait_for_nobody() -> None:
    for rank, values in ((1, {"x/opened/0": 0}), (0, {"x/opened/0": 3})):
        store = Counters(dict(values))
        assert (
            client_module.connect_current_store(lambda store=store: store, "x", rank, 600.0)
            is store
        )  # type: ignore[misc,type-var]
