"""The backend `mpi`: boxing over MPI, one process a rank, for tensors on CPUs.

Read the modules in this order: `mpi_library` (finding mpi4py), `control_store` (what ranks tell
each other), `direct_collectives` (collectives made of messages; `reduce`, `wire`), `group` (what
one set of ranks does, and how to wait for it), `outbox` (messages on their way), `connections` (all
groups, and how they break), `communicator` (one step), `exit` (how a process leaves), `backend`.
"""
