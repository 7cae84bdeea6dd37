"""The backend `mpi`: boxing over MPI, one process a rank, for tensors on CPUs.

Read the modules in this order: `job` (how a process enters its MPI job and leaves it),
`control_store` (what ranks tell each other), `direct_collectives` (collectives made of messages, of
`tensors`), `mpi_group` (what one set of ranks does, and how to wait for it), `mpi_connections` (all
groups, messages on their way, and how it all breaks), `mpi_communicator` (one step), `mpi_backend`.
"""
