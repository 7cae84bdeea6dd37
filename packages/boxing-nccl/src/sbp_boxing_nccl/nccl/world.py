"""Find the rank of this process and the other ranks, over MPI or torch's store.

The backend `nccl` calls `rendezvous` when it opens, before NCCL connects the ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from typing import Any, cast

from sbp_boxing_nccl.configs import NcclBoxingConfig
from sbp_boxing_nccl.mpi.control_store import MpiControlStore
from sbp_boxing_nccl.mpi.job import JobExit, load_mpi
from sbp_core.errors import BoxingError
from sbp_core.processes import (
    ControlStore,
    KeyValueControlStore,
    connect_current_store,
    count_opening,
    local_rank,
    rank_and_size,
    wait_until,
)

#: Key of the store for counting the backends that a rank has opened.
_COUNTER = "sbp-boxing-nccl"

#: Size of the hash of a host's name, in bytes.
_HOST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclWorld:
    """Rank of this process, number of ranks, and the control store that connects them.

    Args:
        rank: Rank of this process.
        size: Number of processes; one rank each.
        local_rank: Index of this process among the processes of its machine.
        control_store: Store for short entries that all ranks share.
        free: Called at the end, if no rank has failed; all ranks call it.
        exit: Aborts the MPI job if this process ends early; None without an MPI job.
    """

    rank: int
    size: int
    local_rank: int
    control_store: ControlStore
    free: Callable[[], None] = field(default=lambda: None, repr=False)
    exit: JobExit | None = field(default=None, repr=False)


def rendezvous(config: NcclBoxingConfig) -> NcclWorld:
    """Find the rank of this process and the other ranks, by the method `config.bootstrap`.

    Raises:
        ConfigError: neither the config nor the environment defines the rank.
        BoxingError: the other ranks could not be reached in time.
    """
    if config.bootstrap == "mpi":
        mpi = load_mpi(config.connect_timeout_s)
        return rendezvous_by_mpi(mpi.COMM_WORLD, mpi, config.connect_timeout_s)
    return _rendezvous_by_store(config)


def rendezvous_by_mpi(comm: Any, mpi: Any, limit_s: float) -> NcclWorld:
    """Find the other ranks, which are the processes of a communicator.

    Args:
        comm: mpi4py communicator whose processes are the ranks, in order; the caller frees it.
        mpi: The module `mpi4py.MPI`.
        limit_s: Seconds to wait for the other ranks.

    Raises:
        BoxingError: a rank is missing.
    """
    end = JobExit(comm, mpi)
    try:
        own, hosts = _gather_hosts(comm, mpi, limit_s)
    except BaseException:
        end.leave(well=False)
        raise
    rank: int = comm.Get_rank()
    return NcclWorld(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(hosts[rank]),
        control_store=MpiControlStore(own, mpi),
        free=own.Free,
        exit=end,
    )


def _gather_hosts(comm: Any, mpi: Any, limit_s: float) -> tuple[Any, list[bytes]]:
    """Return a duplicate of the communicator, and a hash of the host of each rank.

    Raises:
        BoxingError: a rank is missing.
    """
    own, request = comm.Idup()
    came, every = _wait(request.Test, limit_s), bytearray(comm.Get_size() * _HOST_BYTES)
    if came:
        host = blake2b(socket.gethostname().encode(), digest_size=_HOST_BYTES).digest()
        request = own.Iallgather([host, mpi.BYTE], [every, mpi.BYTE])
        came = _wait(request.Test, limit_s)
    if not came:
        raise BoxingError(
            f"not all ranks of MPI opened the boxing backend within {limit_s:g} s",
            where=f"rank {comm.Get_rank()} of {comm.Get_size()}",
            todo="check that every process opens the boxing backend",
        )
    return own, [bytes(every[at : at + _HOST_BYTES]) for at in range(0, len(every), _HOST_BYTES)]


def _rendezvous_by_store(config: NcclBoxingConfig) -> NcclWorld:
    """Find the other ranks at `config.init_method`, as torchrun arranges it."""
    import torch.distributed as dist

    from sbp_torch.boxing.processes import store_at

    rank, size = rank_and_size(
        config.rank,
        config.world_size,
        todo="start the program with torchrun --nproc-per-node=N, set boxing.{key}, or use "
        "boxing.bootstrap=mpi under mpiexec",
    )
    limit_s = config.connect_timeout_s

    def connect() -> Any:
        return store_at(config.init_method, rank, size, timedelta(seconds=limit_s))

    try:
        store = connect_current_store(connect, _COUNTER, rank, limit_s)
        # A prefix of the store that no earlier backend of these processes has used.
        opened = count_opening(store, _COUNTER, rank)
        store = cast(Any, dist).PrefixStore(f"{_COUNTER}/{opened}", store)
    except (RuntimeError, ValueError, OSError) as error:
        raise BoxingError(
            f"no rendezvous at {config.init_method} within {limit_s:g} s: {error}",
            where=f"rank {rank} of {size}",
            todo="check that every process was started and that the address can be reached",
        ) from error
    return NcclWorld(
        rank=rank,
        size=size,
        local_rank=local_rank(rank),
        control_store=KeyValueControlStore(store, rank, size),
    )


def _wait(done: Callable[[], bool], limit_s: float) -> bool:
    return wait_until(done, limit_s, first_pause_s=1e-4, longest_pause_s=5e-3)
