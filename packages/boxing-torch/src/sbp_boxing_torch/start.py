"""How the processes of the backend `torch` are started on this machine. Imports no torch."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.boxing.supervision.start import Start, thread_share
from sbp_core.errors import BoxingError, ConfigError

#: Ports below those that systems give to outgoing connections: one that is free stays free until
#: the processes have been started, unless another run draws it in the same moment.
_PORTS = range(20_000, 32_000)

_HOST = "127.0.0.1"

#: Ports that are tried before giving up.
_TRIES = 200


def processes(
    config: TorchBoxingConfig, num_ranks: int, command: Sequence[str]
) -> tuple[Start, ...]:
    """Return one start a rank, with the variables that torchrun sets too.

    Raises:
        BoxingError: no port is free.
        ConfigError: the settings are those of one process.
    """
    if config.rank is not None or config.world_size not in (None, num_ranks):
        raise ConfigError(
            f"rank={config.rank}, world_size={config.world_size} do not fit {num_ranks} processes",
            accepted="null for both, where the processes are started here",
            todo="leave boxing.rank and boxing.world_size out",
        )
    shared = {"WORLD_SIZE": str(num_ranks)}
    if config.init_method.startswith("env://"):
        shared |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(free_port())}
    return tuple(
        Start(
            command=tuple(command),
            ranks=(rank,),
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            defaults=thread_share(num_ranks),
        )
        for rank in range(num_ranks)
    )


def free_port() -> int:
    """Return a port of this machine that nothing listens on, drawn at random.

    Raises:
        BoxingError: none was found.
    """
    draw = random.SystemRandom()
    for _ in range(_TRIES):
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise BoxingError(
        f"no free port among {_PORTS.start} .. {_PORTS.stop - 1}",
        todo="close other programs, or set boxing.init_method=file:///PATH of a new file",
    )
