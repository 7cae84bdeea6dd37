import contextlib
import gc
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from sbp_boxing_torch.backend import TorchBackend
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.rendezvous import TorchWorld
from sbp_core.boxing.router import route
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.processes.waiting import wait_until
from sbp_core.sbp import B, NdSbp, P, Sbp
from sbp_core.testing.holdings import grown, holdings


def one_step(before: Sbp, after: Sbp, sources: list[int], targets: list[int]) -> BoxingStep:
    """The only step that takes float32 (4, 2) from one to the other."""
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route((4, 2), "float32", (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def told(call: Any) -> str:
    """Return what the BoxingError of a call says."""
    with pytest.raises(BoxingError) as caught:
        call()
    return str(caught.value)


def reduce(backend: TorchBackend, rank: int, tag: str, deadline_s: float = 30.0) -> torch.Tensor:
    return backend.communicator(rank).collective(
        one_step(P, B, [0, 1], [0, 1]), torch.ones(4, 2), tag=tag, deadline_s=deadline_s
    )


def test_a_world_of_one_rank_needs_nobody() -> None:
    store: Any = dist.HashStore()
    backend = TorchBackend(TorchBoxingConfig(), world=TorchWorld(rank=0, size=1, store=store))
    backend.open([0])
    mesh = Placement([0], ("x",))
    step = BoxingStep(
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
    backend = TorchBackend(TorchBoxingConfig(), world=TorchWorld(rank=0, size=2, store=store))

    with pytest.raises(BoxingError, match=r"ranks \[0, 1, 2, 3\], but 2 processes"):
        backend.open(range(4))


def test_a_backend_has_no_communicator_before_it_is_open_nor_for_other_ranks() -> None:
    store: Any = dist.HashStore()
    backend = TorchBackend(TorchBoxingConfig(), world=TorchWorld(rank=0, size=1, store=store))

    with pytest.raises(BoxingError, match="rank 0 does not run in this process"):
        backend.communicator(0)
    backend.open([0])
    with pytest.raises(BoxingError, match="rank 1 does not run in this process"):
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


@pytest.mark.slow
def test_processes_meet_by_the_config_alone(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(2, partial(meet_by_file, path=str(tmp_path / "store")))

    assert results == [[2.0] * 8] * 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def meet_twice(rank: int, _: TorchBackend, port: int, host_ends_late_s: float) -> list[float]:
    config = TorchBoxingConfig(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    sums = []
    for _ in range(2):
        backend = TorchBackend(config)
        backend.open([0, 1])
        sums.append(reduce(backend, rank, "sum").sum().item())
        client: Any = backend._connections.control_store._client  # type: ignore[union-attr]
        if rank == 0:
            client.close = partial(end_late, client.close, host_ends_late_s)
        backend.close()
    return sums


def end_late(end: Callable[[], None], late_s: float) -> None:
    time.sleep(late_s)
    end()


@pytest.mark.parametrize("host_ends_late_s", [0.0, 0.5])
def test_backends_may_meet_one_after_the_other_in_one_place(
    pool: RankPool, host_ends_late_s: float
) -> None:
    job = partial(meet_twice, port=free_port(), host_ends_late_s=host_ends_late_s)

    assert pool.run(2, job) == [[16.0, 16.0]] * 2


def hold(rank: int, _: TorchBackend, port: int, how: str) -> list[str]:
    """Return what there is more after each of some backends than before it."""
    config = TorchBoxingConfig(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    left = []
    gc.disable()
    for number in range(3):
        before = holdings()
        backend = TorchBackend(config)
        backend.open([0, 1])
        reduce(backend, rank, "sum")
        if how == "fail" and rank == 0:
            backend.fail(ArithmeticError("loss is not a number"))
        if how == "miss" and rank == 1:
            time.sleep(0.6)
        elif how != "well":
            with contextlib.suppress(BoxingError):  # an error that is kept would keep its frames
                reduce(backend, rank, "in vain", deadline_s=0.3)
        backend.close()
        # The kernel takes a moment to end a thread that has ended; what torch makes at its first
        # use stays, so that there is less to wait for.
        end = time.monotonic() + (10.0 if number else 0.5)
        while grown(before, holdings()) and time.monotonic() < end:
            time.sleep(0.01)
        left.append(grown(before, holdings()))
    gc.enable()
    return left


@pytest.mark.parametrize("how", ["well", "fail", "miss"])
def test_a_closed_backend_holds_no_thread_socket_or_file_not_even_until_it_is_collected(
    pool: RankPool, how: str
) -> None:
    # What torch makes at its first use stays.
    assert [left[1:] for left in pool.run(2, partial(hold, port=free_port(), how=how))] == [
        ["", ""]
    ] * 2


def fail_when_connected(rank: int, backend: TorchBackend, over: Path) -> str:
    connections: Any = backend._connections
    connect = connections._connect

    def connect_then(*arguments: Any) -> Any:
        group = connect(*arguments)
        if rank == 0:
            backend.fail(ArithmeticError("loss is not a number"))
        else:
            assert wait_until(over.exists, 60.0, first_pause_s=0.01, longest_pause_s=0.01)
        return group

    connections._connect = connect_then
    message = told(partial(reduce, backend, rank, "sum", deadline_s=600.0))
    over.touch()
    return message


def test_a_failure_while_a_group_is_connected_ends_its_first_call(
    pool: RankPool, tmp_path: Path
) -> None:
    for message in pool.run(2, partial(fail_when_connected, over=tmp_path / "over")):
        assert "loss is not a number" in message


def connect_in_vain(rank: int, backend: TorchBackend) -> str:
    connections: Any = backend._connections

    def never(*arguments: Any) -> Any:
        raise BoxingError("ranks [0, 1] were not connected: rank 1 has ended")

    connections._connect = never
    return told(partial(reduce, backend, rank, "sum"))


def test_a_group_that_cannot_be_connected_is_blamed_on_the_step_that_needs_it(
    pool: RankPool,
) -> None:
    first, _ = pool.run(2, connect_in_vain)

    assert "boxing step 'sum' could not complete" in first
    assert "all-reduce" in first and "rank 1 has ended" in first


def send_in_vain(rank: int, backend: TorchBackend) -> str:
    communicator, step = backend.communicator(rank), one_step(B, B, [0], [1])
    if rank == 1:
        time.sleep(1.0)
        return ""
    communicator.send(step, torch.ones(4, 2), tag="in vain", deadline_s=0.2)
    time.sleep(0.8)
    return told(partial(communicator.send, step, torch.ones(4, 2), tag="next", deadline_s=5.0))


def test_a_message_that_nobody_receives_in_time_fails_the_sender(pool: RankPool) -> None:
    message, _ = pool.run(2, send_in_vain)

    assert "'next'" in message and "'in vain'" in message
    assert "did not arrive: 1" in message
