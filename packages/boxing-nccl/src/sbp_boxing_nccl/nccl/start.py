"""How the processes of the backend `nccl` are started on this machine. Imports no torch."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from sbp_boxing_nccl import start
from sbp_boxing_nccl.configs import NcclBoxingConfig
from sbp_core.boxing.supervision.start import Start, thread_share
from sbp_core.errors import ConfigError

_HOST = "127.0.0.1"


def processes(
    config: NcclBoxingConfig, num_ranks: int, command: Sequence[str]
) -> tuple[Start, ...]:
    """Return the start of `mpiexec`, or of one process a rank, as `config.bootstrap` says.

    Raises:
        BoxingError: there is no `mpiexec`.
        ConfigError: the settings are those of one process.
    """
    if config.bootstrap == "mpi":
        return start.processes(num_ranks, command)
    if config.rank is not None or config.world_size not in (None, num_ranks):
        raise ConfigError(
            f"rank={config.rank}, world_size={config.world_size} do not fit {num_ranks} processes",
            accepted="null for both, where the processes are started here",
            todo="leave boxing.rank and boxing.world_size out",
        )
    shared = {"WORLD_SIZE": str(num_ranks)}
    if config.init_method.startswith("env://"):
        shared |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(_free_port())}
    return tuple(
        Start(
            command=tuple(command),
            ranks=(rank,),
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            defaults=thread_share(num_ranks),
        )
        for rank in range(num_ranks)
    )


def _free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    return port
