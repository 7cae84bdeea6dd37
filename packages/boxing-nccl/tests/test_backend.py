import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from sbp_boxing_nccl.backend import MpiBackend
from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_core.boxing.router import route
from sbp_core.boxing.step import Step
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp


def one_step(
    before: Sbp,
    after: Sbp,
    sources: list[int],
    targets: list[int],
    shape: tuple[int, ...] = (4, 2),
    dtype: str = "float32",
) -> Step:
    """The only step that takes a tensor from one to the other."""
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route(shape, dtype, (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def told(call: Any) -> tuple[str, float]:
    """Return what the BoxingError of a call says, and the seconds until it came."""
    start = time.monotonic()
    with pytest.raises(BoxingError) as caught:
        call()
    return str(caught.value), time.monotonic() - start


def reduce(backend: MpiBackend, rank: int, tag: str) -> torch.Tensor:
    return backend.communicator(rank).collective(
        one_step(P, B, [0, 1], [0, 1]), torch.ones(4, 2), tag=tag, deadline_s=30.0
    )


def misuse(rank: int, backend: MpiBackend) -> list[str]:
    fresh = MpiBackend(MpiBoxingConfig())
    return [
        told(partial(backend.communicator, 1 - rank))[0],
        told(partial(backend.open, [0, 1]))[0],
        told(partial(fresh.communicator, rank))[0],
        told(partial(fresh.open, range(7)))[0],
    ]


def test_a_wrong_rank_a_second_opening_and_a_wrong_world_are_refused(pool: Any) -> None:
    for rank, (other, again, unopened, world) in enumerate(pool.run(2, misuse)):
        assert f"rank {1 - rank} does not live in this process" in other
        assert "opened before" in again
        assert "none: it is not open" in unopened
        assert "MPI has started 4 processes" in world and "mpiexec -n 7" in world


def reduce_over_the_world(rank: int, _: MpiBackend) -> float:
    ranks = [0, 1, 2, 3]
    backend = MpiBackend(MpiBoxingConfig())
    backend.open(ranks)
    total = backend.communicator(rank).collective(
        one_step(P, B, ranks, ranks), torch.ones(4, 2), tag="all", deadline_s=30.0
    )
    backend.close()
    backend.close()
    return total.sum().item()


def test_all_processes_of_mpi_are_the_ranks_if_nothing_else_is_said(pool: Any) -> None:
    assert pool.run(4, reduce_over_the_world) == [32.0] * 4


def exchange_many(rank: int, backend: MpiBackend) -> list[float]:
    """Both ranks first send ten messages, then receive them, the last first."""
    communicator, other = backend.communicator(rank), 1 - rank
    out, back = one_step(B, B, [rank], [other]), one_step(B, B, [other], [rank])
    for number in range(10):
        values = torch.full((4, 2), float(10 * rank + number))
        communicator.send(out, values, tag=f"message {number}", deadline_s=30.0)
        values.zero_()
    return [
        communicator.receive(back, None, tag=f"message {number}", deadline_s=30.0).mean().item()
        for number in reversed(range(10))
    ]


def test_messages_wait_for_their_receiver_and_find_it_by_their_tag(pool: Any) -> None:
    first, second = pool.run(2, exchange_many)

    assert first == [float(10 + number) for number in reversed(range(10))]
    assert second == [float(number) for number in reversed(range(10))]


def send_and_compute(rank: int, backend: MpiBackend) -> float:
    """Send more than MPI takes in at once, and then not call MPI for a while."""
    communicator = backend.communicator(rank)
    step = one_step(B, B, [0], [1], shape=(1000, 1000))
    if rank == 0:
        communicator.send(step, torch.ones(1000, 1000), tag="large", deadline_s=30.0)
        time.sleep(3.0)
        return 0.0
    start = time.monotonic()
    total = communicator.receive(step, None, tag="large", deadline_s=30.0).sum().item()
    assert total == 1e6
    return time.monotonic() - start


def test_a_large_message_moves_while_its_sender_computes(pool: Any) -> None:
    _, took_s = pool.run(2, send_and_compute)

    assert took_s < 2.5


def send_and_go(rank: int, backend: MpiBackend) -> float:
    communicator = backend.communicator(rank)
    step = one_step(B, B, [0], [1], shape=(1000, 1000))
    if rank == 0:
        communicator.send(step, torch.ones(1000, 1000), tag="last words", deadline_s=30.0)
        return 0.0
    time.sleep(0.5)
    return communicator.receive(step, None, tag="last words", deadline_s=30.0).sum().item()


def test_a_rank_that_closes_first_leaves_its_messages_behind(pool: Any) -> None:
    assert pool.run(2, send_and_go) == [0.0, 1e6]


def send_in_vain(rank: int, backend: MpiBackend) -> str:
    communicator = backend.communicator(rank)
    step = one_step(B, B, [0], [1], shape=(1000, 1000))
    values = torch.ones(1000, 1000)
    if rank == 1:
        time.sleep(1.0)
        return ""
    communicator.send(step, values, tag="in vain", deadline_s=0.2)
    time.sleep(0.8)
    return told(partial(communicator.send, step, values, tag="next", deadline_s=5.0))[0]


def test_a_large_message_that_nobody_receives_in_time_fails_the_sender(pool: Any) -> None:
    message, _ = pool.run(2, send_in_vain)

    assert "'next'" in message and "'in vain'" in message
    assert "did not arrive: 1" in message


def fail_while_waiting(rank: int, backend: MpiBackend, connected: bool) -> Any:
    if connected:
        reduce(backend, rank, "first")
    if rank == 1:
        step = one_step(B, B, [0], [1])
        return told(
            partial(backend.communicator(1).receive, step, None, tag="elsewhere", deadline_s=30.0)
        )
    threading.Timer(0.3, backend.fail, (ValueError("loss is not a number"),)).start()
    return told(partial(reduce, backend, rank, "second"))


@pytest.mark.parametrize("connected", [True, False])
def test_a_failure_unblocks_the_calls_of_all_ranks(pool: Any, connected: bool) -> None:
    here, there = pool.run(2, partial(fail_while_waiting, connected=connected))

    assert "'second'" in here[0] and "loss is not a number" in here[0]
    assert "'elsewhere'" in there[0] and "rank 0 reported: loss is not a number" in there[0]
    assert here[1] < 10.0 and there[1] < 10.0


def skip_a_call(rank: int, backend: MpiBackend) -> str:
    communicator, step = backend.communicator(rank), one_step(P, B, [0, 1, 2], [0, 1, 2])
    communicator.collective(step, torch.ones(4, 2), tag="first", deadline_s=30.0)
    if rank == 1:
        time.sleep(2.0)
        return ""
    time.sleep(0.1 * rank)
    call = partial(communicator.collective, step, torch.ones(4, 2), tag="second", deadline_s=1.0)
    return told(call)[0]


def test_only_the_rank_that_does_not_come_again_to_a_connected_group_is_named(pool: Any) -> None:
    first, _, last = pool.run(3, skip_a_call)

    for message in (first, last):
        assert "'second'" in message
        assert "did not arrive: 1\n" in message


def use_after_the_end(rank: int, backend: MpiBackend) -> str:
    reduce(backend, rank, "good")
    backend.close()
    return told(partial(reduce, backend, rank, "late"))[0]


def test_a_closed_backend_says_so(pool: Any) -> None:
    for message in pool.run(2, use_after_the_end):
        assert "'late'" in message and "closed" in message


def give_wrong_shard(rank: int, backend: MpiBackend) -> tuple[str, float]:
    step = one_step(P, B, [0, 1], [0, 1])
    call = partial(backend.communicator(rank).collective, step, tag="odd", deadline_s=5.0)
    message, _ = told(partial(call, torch.ones(2, 4)))
    return message, call(torch.ones(4, 2)).sum().item()


def test_a_shard_of_another_shape_is_refused_before_anything_is_sent(pool: Any) -> None:
    for message, total in pool.run(2, give_wrong_shard):
        assert "(2, 4)" in message and "(4, 2)" in message
        assert total == 16.0


def gather_columns(rank: int, backend: MpiBackend) -> list[float]:
    column = torch.arange(8.0).reshape(4, 2)[:, rank : rank + 1]
    mesh = Placement([0, 1], ("x",))
    (step,) = route((8, 1), "float32", (mesh, NdSbp(S(0))), (mesh, NdSbp(B))).steps
    whole = backend.communicator(rank).collective(step, column, tag="columns", deadline_s=30.0)
    return whole.flatten().tolist()


def test_a_shard_that_is_a_column_of_something_larger_is_gathered(pool: Any) -> None:
    assert pool.run(2, gather_columns) == [[0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]] * 2


def any_of(rank: int, backend: MpiBackend) -> list[bool]:
    flags = torch.arange(3) == rank
    results: list[bool] = []
    for target in (B, S(0)):
        step = one_step(P("max"), target, [0, 1], [0, 1], shape=(3,), dtype="bool")
        part = backend.communicator(rank).collective(
            step, flags, tag=f"any {target}", deadline_s=30.0
        )
        results += part.tolist()
    return results


def test_truth_values_are_reduced(pool: Any) -> None:
    assert pool.run(2, any_of) == [[True, True, False, True, True], [True, True, False, False]]


def add_small(rank: int, backend: MpiBackend) -> list[float]:
    values = torch.tensor([256.0, 1.0]) if rank == 0 else torch.tensor([1.0, 1.0])
    step = one_step(P, B, [0, 1, 2], [0, 1, 2], shape=(2,), dtype="bfloat16")
    return (
        backend.communicator(rank)
        .collective(step, values.bfloat16(), tag="small", deadline_s=30.0)
        .tolist()
    )


def test_half_precision_is_summed_in_single_precision(pool: Any) -> None:
    # 256 + 1 is 256 in bfloat16, twice over; 258 is a bfloat16.
    assert pool.run(3, add_small) == [[258.0, 3.0]] * 3
