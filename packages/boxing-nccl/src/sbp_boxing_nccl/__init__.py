"""sbp boxing over MPI; and, in `nccl`, over NCCL.

Read the modules in this order: `configs` (settings), `library` (finding mpi4py), `board` (notes of
the ranks to each other), `direct` (collectives made of messages; `reduce`, `wire`), `group` (what
one set of ranks does, and how to wait for it), `outbox` (messages on their way), `connections` (all
groups, and how they break), `communicator` (one step), `exit` (how a process leaves), `backend`.
What all backends of several processes share is in `sbp_core.boxing`. Importing this package imports
neither torch nor mpi4py.
"""
