"""How ranks find each other and connect, and what they say if they cannot."""

import threading
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, ThreadNetwork
from steps import collective, transfer
from thread_ranks import DictStore, Ranks

from sbp_boxing_nccl.configs import NcclBoxingConfig
from sbp_boxing_nccl.nccl.bootstrap import check_devices
from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend
from sbp_boxing_nccl.nccl.world import NcclWorld
from sbp_core.boxing.step import StepKind
from sbp_core.errors import BoxingError
from sbp_core.processes import KeyValueControlStore
from sbp_core.sbp import B, P

#: Seconds after which what waits in vain gives up: longer than a test may take.
HANGS_S = 600.0


def told(call: Any) -> str:
    """What the BoxingError of a call says."""
    with pytest.raises(BoxingError) as caught:
        call()
    return str(caught.value)


def reduce(backend: NcclBackend, rank: int, num_ranks: int, deadline_s: float = HANGS_S) -> Any:
    step = collective(StepKind.ALL_REDUCE, num_ranks, P, B)
    communicator = backend.communicator(rank)
    return communicator.collective(step, torch.ones(4, 2), tag="sum", deadline_s=deadline_s)


def test_when_the_first_rank_cannot_make_an_id_all_hear_why_at_once() -> None:
    ranks = Ranks(3)
    ranks.devices[0].id_error = RuntimeError("NCCL_ERROR_SYSTEM_ERROR: no network")

    answers = ranks.run(lambda rank, backend: told(lambda: reduce(backend, rank, 3)))

    for said in answers:
        assert "no network" in said and "rank 0" in said


def test_a_connection_that_nccl_never_makes_ends_at_the_deadline() -> None:
    ranks = Ranks(2)
    for device in ranks.devices:
        device.hang_init = True

    answers = ranks.run(lambda rank, backend: told(lambda: reduce(backend, rank, 2, 1.0)))

    for said in answers:
        assert "NCCL did not connect ranks [0, 1]" in said
        assert "on this host): is running" in said


def test_a_rank_whose_nccl_fails_is_named_by_the_one_that_nccl_keeps_waiting() -> None:
    ranks = Ranks(2)

    def fail(size: int, unique_id: bytes, index: int) -> Any:
        raise RuntimeError("unhandled cuda error")

    ranks.devices[1].connect = fail  # type: ignore[method-assign]

    first, second = ranks.run(lambda rank, backend: told(lambda: reduce(backend, rank, 2)))

    assert "rank 1" in first and "unhandled cuda error" in first
    assert "could not connect ranks [0, 1]: unhandled cuda error" in second


def test_a_rank_that_does_not_come_to_connect_is_named() -> None:
    told_both = threading.Barrier(3)

    def job(rank: int, backend: NcclBackend) -> Any:
        said = told(lambda: reduce(backend, rank, 3, 1.0)) if rank != 2 else None
        told_both.wait(HANGS_S)
        return said

    first, second, _ = Ranks(3).run(job)

    for said in (first, second):
        assert "did not arrive: 2" in said and "'sum'" in said


def test_two_ranks_with_one_gpu_are_refused_by_name_before_nccl_sees_them() -> None:
    ranks = Ranks(3)
    ranks.devices[2].bus_id = ranks.devices[0].bus_id

    with pytest.raises(BoxingError, match=r"^ranks 0 and 2 have the same GPU: 0000:00:00\.0 of"):
        ranks.run(lambda rank, backend: None)

    assert not any(device.calls for device in ranks.devices)


class NamedBetweenTwoLooks:
    """The store of rank 0, in which rank 1 names its GPU and fails right behind a look for it."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.failed: str | None = None

    def publish(self, key: str, text: str, readers: Any) -> None:
        self.entries[key] = text

    def lookup(self, key: str) -> str | None:
        found = self.entries.get(key)
        if found is None:
            self.entries[key], self.failed = self.entries["device/0"], "rank 1 reported: why"
        return found

    def failure(self) -> str | None:
        return self.failed

    def wait_for(self, done: Any, limit_s: float) -> bool:
        return any(done() for _ in range(10))


def test_what_a_rank_has_named_before_it_failed_is_seen() -> None:
    device = FakeDevice(ThreadNetwork(), 0)

    said = told(lambda: check_devices(NamedBetweenTwoLooks(), device, 1.0))  # type: ignore[arg-type]

    assert said.startswith("ranks 0 and 1 have the same GPU")


def test_gpus_of_equal_bus_ids_on_different_hosts_are_different() -> None:
    ranks = Ranks(2)
    ranks.devices[1].bus_id, ranks.devices[1].host = ranks.devices[0].bus_id, "there"

    totals = ranks.run(lambda rank, backend: reduce(backend, rank, 2).sum().item())

    assert totals == [16.0, 16.0]


def test_ranks_with_different_nccls_are_refused_with_both_versions() -> None:
    ranks = Ranks(2)
    ranks.devices[1].nccl_version = (2, 27, 5)

    with pytest.raises(
        BoxingError, match=r"rank 0 has NCCL 2\.28\.9, but rank 1 has NCCL 2\.27\.5"
    ):
        ranks.run(lambda rank, backend: None)


def test_a_rank_that_does_not_open_is_named_by_the_others() -> None:
    store = DictStore()
    world = NcclWorld(rank=0, size=2, local_rank=0, control_store=KeyValueControlStore(store, 0, 2))
    config = NcclBoxingConfig(bootstrap="store", connect_timeout_s=0.5)
    backend = NcclBackend(config, world=world, device=FakeDevice(ThreadNetwork(), 0))

    said = told(lambda: backend.open([0, 1]))

    assert "did not open their boxing backend: 1" in said


def test_a_rank_without_a_gpu_tells_the_others_why_it_does_not_come() -> None:
    store, answers = DictStore(), {}
    config = NcclBoxingConfig(bootstrap="store", connect_timeout_s=HANGS_S)

    def work(rank: int) -> None:
        world = NcclWorld(
            rank=rank, size=2, local_rank=rank, control_store=KeyValueControlStore(store, rank, 2)
        )
        device = FakeDevice(ThreadNetwork(), 0) if rank == 0 else None
        backend = NcclBackend(config, world=world, device=device)
        if rank == 1:
            backend._load = no_gpu  # type: ignore[method-assign]
        answers[rank] = told(lambda: backend.open([0, 1]))

    def no_gpu(local_rank: int) -> Any:
        raise BoxingError("boxing=nccl needs an NVIDIA GPU, and torch sees none")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)

    assert "torch sees none" in answers[1]
    assert "rank 1 reported" in answers[0] and "torch sees none" in answers[0]


def test_a_run_of_another_size_than_the_world_is_refused() -> None:
    world = NcclWorld(
        rank=0, size=2, local_rank=0, control_store=KeyValueControlStore(DictStore(), 0, 2)
    )
    backend = NcclBackend(NcclBoxingConfig(), world=world, device=FakeDevice(ThreadNetwork(), 0))

    with pytest.raises(BoxingError, match=r"ranks \[0, 1, 2, 3\], but 2 processes"):
        backend.open(range(4))


def test_each_direction_of_a_pair_and_each_group_is_connected_once() -> None:
    def job(rank: int, backend: NcclBackend) -> None:
        communicator, other = backend.communicator(rank), 1 - rank
        for number in range(3):
            reduce(backend, rank, 2)
            out, back = transfer([rank], [other], B, B), transfer([other], [rank], B, B)
            communicator.send(out, torch.ones(4, 2), tag=f"{number}", deadline_s=30.0)
            communicator.receive(back, None, tag=f"{number}", deadline_s=30.0)

    ranks = Ranks(2)
    ranks.run(job)

    for device in ranks.devices:
        assert len(device.channels) == 3
        assert [channel.size for channel in device.channels] == [2, 2, 2]
