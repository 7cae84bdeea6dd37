"""Validated settings of the boxing backends `mpi` and `nccl`, which move tensors between ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from sbp_core.errors import ConfigError
from sbp_core.processes import check_rendezvous, check_timeouts

_DEVICE = re.compile(r"auto|cuda:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiBoxingConfig:
    """Settings of `sbp_boxing_nccl.mpi.mpi_backend.MpiBackend`.

    Args:
        connect_timeout_s: Seconds to wait for the other processes at the start, above 0.

    Raises:
        ConfigError: a setting is invalid.
    """

    #: Each rank is a process.
    spans_processes: ClassVar[bool] = True

    connect_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        check_timeouts(connect_timeout_s=self.connect_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclBoxingConfig:
    """Settings of `sbp_boxing_nccl.nccl.nccl_backend.NcclBackend`.

    Args:
        bootstrap: How the processes find each other before NCCL connects them: `mpi` (started by
            `mpiexec`) or `store` (torch's store, as `torchrun` starts it).
        device: The GPU of this process among those that it sees: `cuda:N`, or `auto` for the number
            of the process on its machine.
        init_method: With `bootstrap=store`, its address: `env://` (MASTER_ADDR and MASTER_PORT),
            `tcp://HOST:PORT` or `file:///PATH`.
        rank: With `bootstrap=store`, rank of this process; from RANK in the environment if None.
        world_size: With `bootstrap=store`, number of processes; from WORLD_SIZE if None.
        connect_timeout_s: Seconds to wait for the other processes at the start, above 0.
        abort_timeout_s: Seconds to wait for NCCL to abort its communicators, above 0.
        run_ahead: Calls return once their work is on its stream, and torch's stream waits for it;
            if a rank is missing, a later call fails. Without it, the host waits.

    Raises:
        ConfigError: a setting is invalid, or two settings contradict each other.
    """

    #: Each rank is a process.
    spans_processes: ClassVar[bool] = True

    bootstrap: Literal["mpi", "store"] = "mpi"
    device: str = "auto"
    init_method: str = "env://"
    rank: int | None = None
    world_size: int | None = None
    connect_timeout_s: float = 60.0
    abort_timeout_s: float = 5.0
    run_ahead: bool = False

    def __post_init__(self) -> None:
        if self.bootstrap not in ("mpi", "store"):
            raise ConfigError(f"bootstrap={self.bootstrap!r} is unknown", accepted="mpi, store")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device={self.device!r} is unknown", accepted="auto, cuda:N")
        if self.bootstrap == "mpi" and (self.rank, self.world_size) != (None, None):
            raise ConfigError(
                f"rank={self.rank} and world_size={self.world_size} are given by MPI",
                accepted="null for both, or bootstrap=store",
            )
        check_rendezvous(self.init_method, self.rank, self.world_size)
        check_timeouts(
            connect_timeout_s=self.connect_timeout_s, abort_timeout_s=self.abort_timeout_s
        )

    @property
    def device_index(self) -> int | None:
        """Index of the GPU among the visible GPUs; None for `auto`."""
        found = _DEVICE.fullmatch(self.device)
        assert found is not None, "checked on construction"
        return None if found[1] is None else int(found[1])
