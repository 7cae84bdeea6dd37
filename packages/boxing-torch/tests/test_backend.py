import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from sbp_boxing_torch.backend import TorchBackend
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.rendezvous import World
from sbp_core.boxing.router import route
from sbp_core.boxing.step import Step, StepKind
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp


def one_step(before: Sbp, after: Sbp, sources: list[int], targets: list[int]) -> Step:
    """The only step that takes float32 (4, 2) from one to the other."""
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route((4, 2), "float32", (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def told(call: Any) -> tuple[str, float]:
    """Return what the BoxingError of a call says, and the seconds until it came."""
    start = time.monotonic()
    with pytest.raises(BoxingError) as caught:
        call()
    return str(caught.value), time.monotonic() - start


def reduce(backend: TorchBackend, rank: int, tag: str, deadline_s: float = 30.0) -> torch.Tensor:
    return backend.communicator(rank).collective(
        one_step(P, B, [0, 1], [0, 1]), torch.ones(4, 2), tag=tag, deadline_s=deadline_s
    )


def test_a_world_of_one_rank_needs_nobody() -> None:
    store: Any = dist.HashStore()
    backend = TorchBackend(TorchBoxingConfig(), world=World(rank=0, size=1, store=store))
    backend.open([0])
    mesh = Placement([0], ("x",))
    step = Step(
        kind=StepKind.ALL_REDUCE,
        shape=(4, 2),
        dtype="float32",
        source=(mesh, NdSbp(P)),
        target=(mesh, NdSbp(B)),
        axes=(0,),
        size_bytes=0,
    )

    result = backend.communicator(0).collective(step, torch.ones(4, 2), tag="me", deadline_s=1.0)

    assert torch.equal(result, torch.ones(4, 2))
    assert backend.local_ranks() == (0,)
    backend.close()


def test_a_run_of_another_size_than_the_world_is_refused() -> None:
    store: Any = dist.HashStore()
    backend = TorchBackend(TorchBoxingConfig(), world=World(rank=0, size=2, store=store))

    with pytest.raises(BoxingError, match=r"ranks \[0, 1, 2, 3\], but 2 processes"):
        backend.open(range(4))


def test_a_backend_has_no_communicator_before_it_is_open_nor_for_other_ranks() -> None:
    store: Any = dist.HashStore()
    backend = TorchBackend(TorchBoxingConfig(), world=World(rank=0, size=1, store=store))

    with pytest.raises(BoxingError, match="rank 0 does not live in this process"):
        backend.communicator(0)
    backend.open([0])
    with pytest.raises(BoxingError, match="rank 1 does not live in this process"):
        backend.communicator(1)
    with pytest.raises(BoxingError, match="opened before"):
        backend.open([0])
    backend.close()
    with pytest.raises(BoxingError, match="opened before"):
        backend.open([0])


def meet_by_file(rank: int, _: TorchBackend, path: str) -> list[float]:
    config = TorchBoxingConfig(init_method=f"file://{path}", rank=rank, world_size=2)
    backend = TorchBackend(config)
    backend.open([0, 1])
    result = reduce(backend, rank, "sum")
    backend.close()
    backend.close()
    return result.flatten().tolist()


def test_processes_meet_by_the_config_alone(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(2, partial(meet_by_file, path=str(tmp_path / "store")))

    assert results == [[2.0] * 8] * 2


def meet_twice(rank: int, _: TorchBackend, port: int) -> list[float]:
    config = TorchBoxingConfig(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    sums = []
    for _ in range(2):
        backend = TorchBackend(config)
        backend.open([0, 1])
        sums.append(reduce(backend, rank, "sum").sum().item())
        backend.close()
    return sums


def test_backends_may_meet_one_after_the_other_in_one_place(pool: RankPool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    assert pool.run(2, partial(meet_twice, port=port)) == [[16.0, 16.0]] * 2


def exchange_many(rank: int, backend: TorchBackend) -> list[float]:
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


def test_messages_wait_for_their_receiver_and_find_it_by_their_tag(pool: RankPool) -> None:
    first, second = pool.run(2, exchange_many)

    assert first == [float(10 + number) for number in reversed(range(10))]
    assert second == [float(number) for number in reversed(range(10))]


def send_and_go(rank: int, backend: TorchBackend) -> float:
    communicator, step = backend.communicator(rank), one_step(B, B, [0], [1])
    if rank == 0:
        communicator.send(step, torch.ones(4, 2), tag="last words", deadline_s=30.0)
        return 0.0
    time.sleep(0.5)
    return communicator.receive(step, None, tag="last words", deadline_s=30.0).sum().item()


def test_a_rank_that_closes_first_leaves_its_messages_behind(pool: RankPool) -> None:
    assert pool.run(2, send_and_go) == [0.0, 8.0]


def send_in_vain(rank: int, backend: TorchBackend) -> str:
    communicator, step = backend.communicator(rank), one_step(B, B, [0], [1])
    if rank == 1:
        time.sleep(1.0)
        return ""
    communicator.send(step, torch.ones(4, 2), tag="in vain", deadline_s=0.2)
    time.sleep(0.8)
    return told(partial(communicator.send, step, torch.ones(4, 2), tag="next", deadline_s=5.0))[0]


def test_a_message_that_nobody_receives_in_time_fails_the_sender(pool: RankPool) -> None:
    message, _ = pool.run(2, send_in_vain)

    assert "'next'" in message and "'in vain'" in message
    assert "did not arrive: 1" in message


def fail_while_waiting(rank: int, backend: TorchBackend, connected: bool) -> Any:
    if connected:
        reduce(backend, rank, "first")
    if rank == 1:
        step = one_step(B, B, [0], [1])
        call = partial(
            backend.communicator(1).receive, step, None, tag="elsewhere", deadline_s=30.0
        )
        return told(call)
    error = ValueError("loss is not a number")
    threading.Timer(0.3, backend.fail, (error,)).start()
    with pytest.raises(BoxingError) as caught:
        reduce(backend, rank, "second")
    return str(caught.value), caught.value.__cause__ is not None


@pytest.mark.parametrize("connected", [True, False])
def test_a_failure_unblocks_the_calls_of_all_ranks(pool: RankPool, connected: bool) -> None:
    here, there = pool.run(2, partial(fail_while_waiting, connected=connected))

    assert "'second'" in here[0] and "loss is not a number" in here[0]
    assert "'elsewhere'" in there[0] and "rank 0 reported: loss is not a number" in there[0]
    assert there[1] < 10.0


def skip_a_call(rank: int, backend: TorchBackend) -> str:
    communicator, step = backend.communicator(rank), one_step(P, B, [0, 1, 2], [0, 1, 2])
    communicator.collective(step, torch.ones(4, 2), tag="first", deadline_s=30.0)
    if rank == 1:
        time.sleep(2.0)
        return ""
    time.sleep(0.1 * rank)
    call = partial(communicator.collective, step, torch.ones(4, 2), tag="second", deadline_s=1.0)
    return told(call)[0]


def test_only_the_rank_that_does_not_come_again_to_a_connected_group_is_named(
    pool: RankPool,
) -> None:
    first, _, last = pool.run(3, skip_a_call)

    for message in (first, last):
        assert "'second'" in message
        assert "did not arrive: 1\n" in message


def use_after_the_end(rank: int, backend: TorchBackend) -> list[str]:
    reduce(backend, rank, "good")
    backend.close()
    return [told(partial(reduce, backend, rank, "late"))[0]]


def test_a_closed_backend_says_so(pool: RankPool) -> None:
    for (message,) in pool.run(2, use_after_the_end):
        assert "'late'" in message and "closed" in message


def give_wrong_shard(rank: int, backend: TorchBackend) -> tuple[str, float]:
    step = one_step(P, B, [0, 1], [0, 1])
    call = partial(backend.communicator(rank).collective, step, tag="odd", deadline_s=5.0)
    message, _ = told(partial(call, torch.ones(2, 4)))
    return message, call(torch.ones(4, 2)).sum().item()


def test_a_shard_of_another_shape_is_refused_before_anything_is_sent(pool: RankPool) -> None:
    for message, total in pool.run(2, give_wrong_shard):
        assert "(2, 4)" in message and "(4, 2)" in message
        assert total == 16.0


def gather_columns(rank: int, backend: TorchBackend) -> list[float]:
    column = torch.arange(8.0).reshape(4, 2)[:, rank : rank + 1]
    mesh = Placement([0, 1], ("x",))
    (step,) = route((8, 1), "float32", (mesh, NdSbp(S(0))), (mesh, NdSbp(B))).steps
    whole = backend.communicator(rank).collective(step, column, tag="columns", deadline_s=30.0)
    return whole.flatten().tolist()


def test_a_shard_that_is_a_column_of_something_larger_is_gathered(pool: RankPool) -> None:
    assert pool.run(2, gather_columns) == [[0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]] * 2


def any_of(rank: int, backend: TorchBackend) -> list[bool]:
    mesh = Placement([0, 1], ("x",))
    flags = torch.arange(3) == rank
    results = []
    for target in (NdSbp(B), NdSbp(S(0))):
        (step,) = route((3,), "bool", (mesh, NdSbp(P("max"))), (mesh, target)).steps
        results += (
            backend.communicator(rank)
            .collective(step, flags, tag=f"any {target}", deadline_s=30.0)
            .tolist()
        )
    return results


def test_truth_values_are_reduced(pool: RankPool) -> None:
    assert pool.run(2, any_of) == [[True, True, False, True, True], [True, True, False, False]]
