from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_mpi import MPI, Comm, Network, Request

from sbp_boxing_nccl.mpi.mpi_group import SPIN_S, MpiGroup, MpiWork, pause_after


def request() -> Request:
    return Request(memoryview(b""))


def test_work_that_is_not_over_in_time_can_be_waited_for_again() -> None:
    under_way = request()
    work = MpiWork(request=under_way, tensors=())

    in_time = work.wait(0.01, lambda: None)
    under_way.is_over = True

    assert not in_time
    assert work.wait(0.01, lambda: None) and work.is_over


def test_a_schedule_goes_on_where_it_was_given_up() -> None:
    first, second, steps = request(), request(), []

    def schedule() -> Iterator[Any]:
        yield first
        steps.append("first")
        yield second
        steps.append("second")

    work = MpiWork(request=schedule(), tensors=())
    first.is_over = True
    assert not work.wait(0.01, lambda: None)
    assert steps == ["first"]
    second.is_over = True
    assert work.look()
    assert steps == ["first", "second"]
    assert work.num_done == 2


def test_a_check_that_raises_ends_the_waiting() -> None:
    def check() -> None:
        raise ValueError("a rank has failed")

    with pytest.raises(ValueError, match="a rank has failed"):
        MpiWork(request=request(), tensors=()).wait(30.0, check)


def test_pauses_grow_with_the_time_without_progress_and_have_a_bound() -> None:
    assert pause_after(SPIN_S) == 0.0
    assert 0.0 < pause_after(2 * SPIN_S) < pause_after(4 * SPIN_S) < SPIN_S
    assert pause_after(100.0) == pause_after(1000.0) < 0.01


@pytest.mark.parametrize("elements", [0, 1, 1000, 3 * 2**19 + 1, 2**25 + 1])
def test_both_ends_cut_a_message_into_the_same_few_parts(elements: int) -> None:
    network = Network(2)
    ends = [MpiGroup((0, 1), Comm(network, rank), MPI) for rank in (0, 1)]
    given, received = torch.ones(elements).to(torch.uint8), torch.zeros(elements).to(torch.uint8)

    sending, receiving = ends[0].send(given, 1, 5), ends[1].receive(received, 0, 5)
    assert 1 <= len(network.matched) <= 64
    while network.matched:
        network.deliver(len(network.matched) // 2)

    assert sending.look() and receiving.look()
    assert torch.equal(given, received)


def test_what_a_rank_sends_to_itself_is_copied() -> None:
    end = MpiGroup((0, 1), Comm(Network(2), 0), MPI)
    kept = torch.zeros(3)

    work = end.exchange(kept, torch.ones(3), (3, 0), (3, 0))

    assert work.look()
    assert torch.equal(kept, torch.ones(3))
