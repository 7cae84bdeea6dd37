"""How to start one process a rank so that they find each other: with torchrun's variables."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from sbp_core.boxing.supervision.launch_spec import LaunchSpec, thread_share
from sbp_core.errors import BoxingError, ConfigError

#: Ports below those that systems give to outgoing connections: one that is free stays free until
#: the processes have been started, unless another run draws it in the same moment.
_PORTS = range(20_000, 32_000)

_HOST = "127.0.0.1"

#: Ports that are tried before giving up.
_TRIES = 200


def one_process_per_rank(
    num_ranks: int,
    command: Sequence[str],
    *,
    init_method: str,
    rank: int | None,
    world_size: int | None,
) -> tuple[LaunchSpec, ...]:
    """Return how to start one process for each rank, on this machine.

    Args:
        num_ranks: Ranks of the run, >= 1.
        command: Program and arguments.
        init_method: Setting of the backend: `env://`, for which an address is found here, or a
            rendezvous that is left as it is.
        rank: Setting of the backend; None where the processes are started here.
        world_size: Setting of the backend; None, or as many as ranks.

    Raises:
        BoxingError: no port is free.
        ConfigError: the settings are those of one process.
    """
    if rank is not None or world_size not in (None, num_ranks):
        raise ConfigError(
            f"rank={rank}, world_size={world_size} do not fit {num_ranks} processes",
            accepted="null for both, where the processes are started here",
            todo="leave boxing.rank and boxing.world_size out",
        )
    shared = {"WORLD_SIZE": str(num_ranks)}
    if init_method.startswith("env://"):
        shared |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(free_port())}
    return tuple(
        LaunchSpec(
            command=tuple(command),
            ranks=(number,),
            environment={**shared, "RANK": str(number), "LOCAL_RANK": str(number)},
            defaults=thread_share(num_ranks),
        )
        for number in range(num_ranks)
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
