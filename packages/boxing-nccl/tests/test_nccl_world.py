"""Rendezvous by torch's store, and the entries of the backend there."""

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, ThreadNetwork
from steps import collective
from thread_ranks import DictStore

from sbp_boxing_nccl.configs import NcclBoxingConfig
from sbp_boxing_nccl.nccl import world as world_module
from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend
from sbp_boxing_nccl.nccl.world import rendezvous, rendezvous_by_mpi
from sbp_core.boxing.step import StepKind
from sbp_core.errors import BoxingError, ConfigError
from sbp_core.processes import KeyValueControlStore
from sbp_core.sbp import B, P

#: Stands for the GPUs of a machine that has some.
GPU: Any = object()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_processes_find_each_other_at_an_address_and_reduce() -> None:
    url, network, totals = f"tcp://127.0.0.1:{free_port()}", ThreadNetwork(), {}

    def work(rank: int) -> None:
        config = NcclBoxingConfig(bootstrap="store", init_method=url, rank=rank, world_size=2)
        backend = NcclBackend(config, device=FakeDevice(network, rank))
        backend.open([0, 1])
        step = collective(StepKind.ALL_REDUCE, 2, P, B)
        total = backend.communicator(rank).collective(
            step, torch.ones(4, 2), tag="sum", deadline_s=30.0
        )
        backend.close()
        totals[rank] = total.sum().item()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)

    assert totals == {0: 16.0, 1: 16.0}


def test_rank_and_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))

    world = rendezvous(NcclBoxingConfig(bootstrap="store"))

    assert (world.rank, world.size, world.local_rank) == (0, 1, 3)
    world.control_store.close()


def test_without_a_rank_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)

    with pytest.raises(ConfigError, match="rank is not set") as caught:
        rendezvous(NcclBoxingConfig(bootstrap="store"))

    assert "torchrun" in caught.value.todo and "mpiexec" in caught.value.todo


def test_a_place_where_nobody_is_ends_in_an_error_in_time() -> None:
    config = NcclBoxingConfig(
        bootstrap="store",
        init_method=f"tcp://127.0.0.1:{free_port()}",
        rank=1,
        world_size=2,
        connect_timeout_s=0.5,
    )

    with pytest.raises(BoxingError, match=r"no rendezvous at tcp://.* within 0\.5 s"):
        rendezvous(config)


class Exits:
    """Stands in for `JobExit`: how ranks left."""

    def __init__(self, *_: Any) -> None:
        self.well: list[bool] = []

    def leave(self, *, well: bool) -> None:
        self.well.append(well)


class Comm:
    """Two ranks of MPI, this one the second; some of its calls never end."""

    def __init__(self, *endless: str) -> None:
        self._endless = endless

    def Get_rank(self) -> int:  # noqa: N802 (mpi4py's name)
        return 1

    def Get_size(self) -> int:  # noqa: N802 (mpi4py's name)
        return 2

    def Idup(self) -> Any:  # noqa: N802 (mpi4py's name)
        return self, SimpleNamespace(Test=lambda: "Idup" not in self._endless)

    def Iallgather(self, sent: Any, received: Any) -> Any:  # noqa: N802 (mpi4py's name)
        received[0][:] = bytes(sent[0]) * 2
        return SimpleNamespace(Test=lambda: "Iallgather" not in self._endless)

    def Free(self) -> None:  # noqa: N802 (mpi4py's name)
        """Nothing is held."""


@pytest.mark.parametrize("endless", ["Idup", "Iallgather"])
def test_ranks_of_mpi_that_do_not_come_are_not_waited_for(
    endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = Exits()
    monkeypatch.setattr(world_module, "JobExit", lambda *_: exits)

    with pytest.raises(BoxingError, match=r"not all ranks of MPI opened .* within 0\.2 s"):
        rendezvous_by_mpi(Comm(endless), SimpleNamespace(BYTE="byte"), 0.2)

    assert exits.well == [False]


def test_ranks_of_mpi_on_one_host_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "JobExit", Exits)

    world = rendezvous_by_mpi(Comm(), SimpleNamespace(BYTE="byte"), 5.0)

    assert (world.rank, world.size, world.local_rank) == (1, 2, 1)


def test_an_entry_for_one_rank_is_read_once_and_then_deleted() -> None:
    store: Any = DictStore()
    one, other = KeyValueControlStore(store, 0, 2), KeyValueControlStore(store, 1, 2)

    assert other.take("mail/0") is None
    one.publish("mail/0", "hello", [1])

    assert other.lookup("mail/0") == "hello"
    assert other.take("mail/0") == "hello"
    assert other.take("mail/0") is None
    one.close()
    other.close()


def test_the_first_failure_stays() -> None:
    store: Any = DictStore()
    one, other = KeyValueControlStore(store, 0, 2), KeyValueControlStore(store, 1, 2)

    one.announce_failure("first")
    other._put("failure", "second", [0, 1])

    assert one.failure() == other.failure() == "first"
    one.close()
    other.close()


def test_processes_for_the_store_get_their_rank_and_one_address() -> None:
    backend = NcclBackend(NcclBoxingConfig(bootstrap="store"), device=GPU)

    specs = backend.launch_specs(2, ["python", "x.py"])

    assert [spec.environment["RANK"] for spec in specs] == ["0", "1"]
    assert [spec.environment["LOCAL_RANK"] for spec in specs] == ["0", "1"]
    assert len({spec.environment["MASTER_PORT"] for spec in specs}) == 1


def test_settings_of_one_process_start_no_others() -> None:
    config = NcclBoxingConfig(bootstrap="store", rank=0, world_size=2)

    with pytest.raises(ConfigError, match="do not fit 2 processes"):
        NcclBackend(config, device=GPU).launch_specs(2, ["python", "x.py"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_process_is_started_on_a_machine_without_a_gpu() -> None:
    with pytest.raises(BoxingError, match=r"^boxing=nccl needs an NVIDIA GPU"):
        NcclBackend(NcclBoxingConfig()).launch_specs(2, ["python", "x.py"])
