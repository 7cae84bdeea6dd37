"""The backend `torch`: boxing (moving and resharding tensors) over torch.distributed.

It combines the `connections` of one rank in each process and the boxing steps (`communicator`). The
base class opens and closes both (`sbp_core.processes.process_backend`). PyTorch is imported when
the backend connects, so a process that only starts the ranks does not load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.boxing import LaunchSpec
from sbp_core.processes import ProcessBackend, check_ranks, one_process_per_rank

if TYPE_CHECKING:
    from sbp_boxing_torch.communicator import TorchCommunicator
    from sbp_boxing_torch.connections import TorchConnections
    from sbp_boxing_torch.rendezvous import TorchWorld


class TorchBackend(ProcessBackend):
    """Boxing over torch.distributed.

    Args:
        config: Settings.
        world: Rank, size and store, if the program has set them up; found by `config.init_method`
            if None.
    """

    def __init__(self, config: TorchBoxingConfig, *, world: TorchWorld | None = None) -> None:
        super().__init__()
        self._config = config
        self._world = world

    def launch_specs(self, num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
        """See `BoxingBackend.launch_specs`: one process a rank."""
        return one_process_per_rank(
            num_ranks,
            command,
            init_method=self._config.init_method,
            rank=self._config.rank,
            world_size=self._config.world_size,
        )

    def _connect(self, ranks: Sequence[int]) -> tuple[TorchConnections, TorchCommunicator]:
        """See `ProcessBackend._connect`.

        Raises:
            ConfigError: neither config nor environment define the rank.
        """
        import torch

        from sbp_boxing_torch.communicator import TorchCommunicator
        from sbp_boxing_torch.connections import TorchConnections
        from sbp_boxing_torch.rendezvous import device_name, rendezvous

        world = self._world or rendezvous(self._config)
        check_ranks(ranks, world.rank, world.size)
        device = torch.device(device_name(self._config))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        connections = TorchConnections(self._config, world)
        return connections, TorchCommunicator(connections, world.rank, device)
