"""The backend `nccl`: boxing over NCCL, one process and one GPU a rank, through CuPy.

Read the modules in this order: `device` (all calls of CuPy and torch.cuda for a GPU), `world` (rank
and size, and the control store for short texts before NCCL connects), `bootstrap` (connecting ranks
in bounded time), `nccl_group` (collectives, and conversion of dtypes), `deadlines` (for work that
no caller waits for), `messages` (matched by tags), `nccl_connections` (all of it, and failures),
`nccl_communicator` (the boxing steps of one rank), `nccl_backend`.
"""
