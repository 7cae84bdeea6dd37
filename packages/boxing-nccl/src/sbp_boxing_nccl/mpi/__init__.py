"""The backend `mpi`: boxing over MPI, one process a rank, for tensors on CPUs.

Read the modules in this order: `job` (start and end of a process in its MPI job), `control_store`
(short entries that ranks exchange), `direct_collectives` (collectives made of point-to-point
messages, of `tensors`), `mpi_group` (collectives of one set of ranks, and waiting for them),
`mpi_connections` (all groups, messages in flight, and failures), `mpi_communicator` (the boxing
steps of one rank), `mpi_backend`.
"""
