"""The backend `torch`: one rank in each process, over torch.distributed.

The connections are `connections`, the steps `communicator`; this is the life of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sbp_boxing_torch.communicator import TorchCommunicator
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.connections import Connections
from sbp_boxing_torch.rendezvous import World, meet
from sbp_core.boxing.backend import BoxingBackend, Communicator
from sbp_core.errors import BoxingError


def build(config: TorchBoxingConfig) -> TorchBackend:
    """Make the backend of a config, not yet open."""
    return TorchBackend(config)


class TorchBackend(BoxingBackend):
    """Boxing over torch.distributed.

    A step that fails breaks the backend: the calls that wait, here and on other ranks, and those
    that come raise `BoxingError`.

    Args:
        config: Settings.
        world: This process among all, if the program has met the others already; found by
            `config.init_method` if None.
    """

    def __init__(self, config: TorchBoxingConfig, *, world: World | None = None) -> None:
        self._config = config
        self._world = world
        self._connections: Connections | None = None
        self._communicator: TorchCommunicator | None = None
        self._closed = False

    def open(self, ranks: Sequence[int]) -> None:
        """See `BoxingBackend.open`.

        Raises:
            ConfigError: neither config nor environment say which rank this is.
        """
        if self._closed or self._connections is not None:
            raise BoxingError("this boxing backend was opened before", todo="build a new one")
        world = self._world = self._world or meet(self._config)
        if sorted(ranks) != list(range(world.size)):
            raise BoxingError(
                f"the run has ranks {sorted(ranks)}, but {world.size} processes were started",
                where=f"rank {world.rank}",
                accepted=f"ranks 0 .. {world.size - 1}, one a process",
                todo="start as many processes as the mesh has ranks",
            )
        device = torch.device(self._config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._connections = Connections(self._config, world)
        self._communicator = TorchCommunicator(self._connections, world.rank, device)

    def local_ranks(self) -> tuple[int, ...]:
        """See `BoxingBackend.local_ranks`: the one rank of this process, once it is open."""
        return () if self._communicator is None else (self._communicator.rank,)

    def communicator(self, rank: int) -> Communicator:
        """See `BoxingBackend.communicator`.

        Raises:
            BoxingError: the rank is another process', or the backend is not open.
        """
        if self._communicator is None or rank != self._communicator.rank:
            raise BoxingError(
                f"rank {rank} does not live in this process",
                accepted=", ".join(map(str, self.local_ranks())) or "none: it is not open",
            )
        return self._communicator

    def fail(self, error: BaseException) -> None:
        """See `BoxingBackend.fail`; unblocks the ranks of other processes too."""
        if self._connections is not None:
            self._connections.fail(error)

    def close(self) -> None:
        """See `BoxingBackend.close`; waits a while for messages and ranks on their way."""
        self._closed = True
        if self._connections is not None:
            self._connections.close()
