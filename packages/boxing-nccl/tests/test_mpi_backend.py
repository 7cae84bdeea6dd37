import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import collective

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
from sbp_core.boxing.router import route
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp, Split
from sbp_core.testing.holdings import grown, holdings
from sbp_torch.boxing.execute import apply_step, shard


def one_step(
    before: Sbp,
    after: Sbp,
    sources: list[int],
    targets: list[int],
    shape: tuple[int, ...] = (4, 2),
    dtype: str = "float32",
) -> BoxingStep:
    """The only step that takes a tensor from one to the other."""
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route(shape, dtype, (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def told(call: Any) -> str:
    """Return what the BoxingError of a call says."""
    with pytest.raises(BoxingError) as caught:
        call()
    return str(caught.value)


def reduce(backend: MpiBackend, rank: int, tag: str) -> torch.Tensor:
    return backend.communicator(rank).collective(
        one_step(P, B, [0, 1], [0, 1]), torch.ones(4, 2), tag=tag, deadline_s=30.0
    )


def misuse(rank: int, backend: MpiBackend) -> list[str]:
    fresh = MpiBackend(MpiBoxingConfig())
    return [
        told(partial(backend.communicator, 1 - rank)),
        told(partial(backend.open, [0, 1])),
        told(partial(fresh.communicator, rank)),
        told(partial(fresh.open, range(7))),
    ]


@pytest.mark.slow
def test_a_wrong_rank_a_second_opening_and_a_wrong_world_are_refused(pool: Any) -> None:
    for rank, (other, again, unopened, world) in enumerate(pool.run(2, misuse)):
        assert f"rank {1 - rank} does not run in this process" in other
        assert "opened before" in again
        assert "none: it is not open" in unopened
        assert "4 processes were started" in world and "mpiexec -n 7" in world


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


def hold_after_closing(rank: int, _: MpiBackend) -> list[str]:
    """Return what there is more after each of some backends than before it."""
    left = []
    for _turn in range(3):
        before = holdings()
        reduce_over_the_world(rank, _)
        end = time.monotonic() + 10.0
        while grown(before, holdings()) and time.monotonic() < end:
            time.sleep(0.01)  # the kernel takes a moment to end a thread that has ended
        left.append(grown(before, holdings()))
    return left


def test_a_closed_backend_holds_no_thread_socket_or_file(pool: Any) -> None:
    # What MPI opens to reach a process for the first time stays.
    assert [left[1:] for left in pool.run(4, hold_after_closing)] == [["", ""]] * 4


def send_and_compute(rank: int, backend: MpiBackend, arrived: Path) -> bool:
    """Send more than MPI takes in at once, and then not call MPI until that has arrived."""
    communicator = backend.communicator(rank)
    step = one_step(B, B, [0], [1], shape=(1000, 1000))
    if rank == 0:
        communicator.send(step, torch.ones(1000, 1000), tag="large", deadline_s=30.0)
        end = time.monotonic() + 40.0
        while not arrived.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return arrived.exists()
    total = communicator.receive(step, None, tag="large", deadline_s=30.0).sum().item()
    arrived.touch()
    return total == 1e6


def test_a_large_message_moves_while_its_sender_computes(pool: Any, tmp_path: Path) -> None:
    arrived = tmp_path / "arrived"

    assert pool.run(2, partial(send_and_compute, arrived=arrived)) == [True, True]


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


def leave_slowly(rank: int, backend: MpiBackend) -> float:
    """Send each entry after a pause, from now on, so that others see the first and not the last."""
    if rank == 1:
        store: Any = backend._connections.control_store
        put = store._put

        def put_late(*entry: Any) -> None:
            time.sleep(0.05)
            put(*entry)

        store._put = put_late
    return 0.0


def reduce_once(rank: int, backend: MpiBackend) -> float:
    return reduce(backend, rank, "once").sum().item()


def test_entries_that_come_late_do_not_disturb_the_next_backend(pool: Any) -> None:
    for _ in range(3):
        pool.run(2, leave_slowly)

        # MPI gives its communicators the numbers of those that were freed.
        assert pool.run(2, reduce_once) == [16.0, 16.0]


def send_in_vain(rank: int, backend: MpiBackend) -> str:
    communicator = backend.communicator(rank)
    step = one_step(B, B, [0], [1], shape=(1000, 1000))
    values = torch.ones(1000, 1000)
    if rank == 1:
        time.sleep(1.0)
        return ""
    communicator.send(step, values, tag="in vain", deadline_s=0.2)
    time.sleep(0.8)
    return told(partial(communicator.send, step, values, tag="next", deadline_s=5.0))


def test_a_large_message_that_nobody_receives_in_time_fails_the_sender(pool: Any) -> None:
    message, _ = pool.run(2, send_in_vain)

    assert "'next'" in message and "'in vain'" in message
    assert "did not arrive: 1" in message


#: Seconds that a rank stops for in making a group.
_STOPPED_S = 4.0


class Slow:
    """A communicator whose process stops for a while just before it makes another."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Create_group(self, ranks: Any) -> Any:  # noqa: N802 (mpi4py's name)
        time.sleep(_STOPPED_S)
        return self._comm.Create_group(ranks)


def connect_slowly(rank: int, backend: MpiBackend) -> str:
    connections: Any = backend._connections
    if rank == 1:
        connections._comm = Slow(connections._comm)
    step = one_step(P, B, [0, 1], [0, 1])
    sum_up = backend.communicator(rank).collective
    answer = told(partial(sum_up, step, torch.ones(4, 2), tag="slow", deadline_s=1.0))
    # The threads that were left behind keep a core busy until then.
    time.sleep(_STOPPED_S)
    return answer


@pytest.mark.slow
def test_a_rank_that_stops_while_a_group_is_made_is_not_waited_for(pool: Any) -> None:
    for said in pool.run(2, connect_slowly):
        assert "'slow'" in said and "did not connect ranks [0, 1]" in said


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


#: More than one chunk for each of three ranks, and not a multiple of their number.
LARGE = (700, 1001)


def values_of(rank: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, LARGE, generator=generator).to(getattr(torch, dtype))


def run_large(rank: int, backend: MpiBackend, dtype: str) -> list[str]:
    """Run each collective on much data, donated or not; return what came out wrong."""
    ranks, wrong = [0, 1, 2], []
    mesh = Placement(ranks, ("x",))
    for number, (kind, before, after) in enumerate(
        [
            (StepKind.ALL_REDUCE, P, B),
            (StepKind.ALL_REDUCE, P("max"), B),
            (StepKind.REDUCE_SCATTER, P, S(0)),
            (StepKind.REDUCE_SCATTER, P("min"), S(1)),
            (StepKind.ALL_GATHER, S(0), B),
            (StepKind.ALL_GATHER, S(1), B),
            (StepKind.ALL_TO_ALL, S(0), S(1)),
        ]
    ):
        if isinstance(before, Split):
            whole = shard(values_of(9, dtype), mesh, NdSbp(before))
        else:
            whole = {other: values_of(other, dtype) for other in ranks}
        step = collective(kind, 3, before, after, LARGE, dtype)
        expected = apply_step(step, whole)[rank]
        for donate in (False, True):
            mine = whole[rank].clone()
            result = backend.communicator(rank).collective(
                step, mine, tag=f"{number} {donate}", deadline_s=60.0, donate=donate
            )
            same = torch.equal(result, expected) and (donate or torch.equal(mine, whole[rank]))
            in_place = result.data_ptr() == mine.data_ptr()
            if not same or in_place != (donate and kind is StepKind.ALL_REDUCE):
                wrong.append(f"{kind}, donated: {donate}")
    return wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_much_data_is_moved_and_reduced_like_little(pool: Any, dtype: str) -> None:
    assert pool.run(3, partial(run_large, dtype=dtype)) == [[], [], []]


def come_late(rank: int, backend: MpiBackend) -> float:
    """Return the seconds that the processor worked for a rank which waited for another."""
    step = one_step(P, B, [0, 1], [0, 1], shape=(1000, 1000))
    communicator = backend.communicator(rank)
    communicator.collective(step, torch.ones(1000, 1000), tag="first", deadline_s=30.0)
    if rank == 1:
        time.sleep(2.0)
    before = time.process_time()
    total = communicator.collective(step, torch.ones(1000, 1000), tag="late", deadline_s=30.0)
    assert total.sum().item() == 2e6
    return time.process_time() - before


@pytest.mark.slow
def test_a_rank_that_waits_for_another_leaves_its_core_to_others(pool: Any) -> None:
    worked_s, _ = pool.run(2, come_late)

    assert worked_s < 1.0
