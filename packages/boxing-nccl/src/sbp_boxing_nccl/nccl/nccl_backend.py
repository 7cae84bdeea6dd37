"""The backend `nccl`: boxing (moving and resharding tensors) over NCCL, a process per rank and GPU.

It combines the connections (`nccl_connections`) and the boxing steps (`nccl_communicator`). The
base classes open and close both (`sbp_core.processes.process_backend`) and end an MPI job
(`mpi.job`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_boxing_nccl.configs import NcclBoxingConfig
from sbp_boxing_nccl.mpi.job import JobBackend
from sbp_boxing_nccl.nccl.device import NcclDevice
from sbp_boxing_nccl.nccl.nccl_communicator import NcclCommunicator
from sbp_boxing_nccl.nccl.nccl_connections import NcclConnections
from sbp_boxing_nccl.nccl.world import NcclWorld, rendezvous
from sbp_core.boxing import LaunchSpec
from sbp_core.errors import BoxingError
from sbp_core.processes import check_ranks, mpiexec_specs, one_process_per_rank


class NcclBackend(JobBackend):
    """Boxing over NCCL, for tensors on GPUs.

    Args:
        config: Settings.
        world: Rank, size and control store, if the program has set them up; found by
            `config.bootstrap` if None.
        device: The GPU; the one that `config.device` names if None.
    """

    def __init__(
        self,
        config: NcclBoxingConfig,
        *,
        world: NcclWorld | None = None,
        device: NcclDevice | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._world = world
        self._device = device

    def launch_specs(self, num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
        """See `BoxingBackend.launch_specs`: a launcher, or one process a rank.

        Raises:
            BoxingError: this machine has too few GPUs.
        """
        if self._device is None:
            from sbp_boxing_nccl.nccl.device import count_gpus

            count_gpus(self._config.device_index)
        if self._config.bootstrap == "mpi":
            return mpiexec_specs(num_ranks, command)
        return one_process_per_rank(
            num_ranks,
            command,
            init_method=self._config.init_method,
            rank=self._config.rank,
            world_size=self._config.world_size,
        )

    def _connect(self, ranks: Sequence[int]) -> tuple[NcclConnections, NcclCommunicator]:
        """See `ProcessBackend._connect`.

        Raises:
            ConfigError: neither config nor environment define the rank.
        """
        world = self._world or rendezvous(self._config)
        self._exit = world.exit
        try:
            check_ranks(ranks, world.rank, world.size)
            device = self._device or self._load(world.local_rank)
        except BoxingError as error:
            # The other ranks wait for this rank: announce its error.
            world.control_store.announce_failure(f"rank {world.rank} reported: {error.what}")
            world.control_store.close()
            raise
        connections = NcclConnections(self._config, world, device)
        return connections, NcclCommunicator(connections)

    def _load(self, local_rank: int) -> NcclDevice:
        from sbp_boxing_nccl.nccl.device import load_device

        return load_device(self._config.device_index, local_rank)
