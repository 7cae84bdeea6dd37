"""The backend `nccl`: boxing over NCCL, one process and one GPU a rank, through CuPy.

Read the modules in this order: `device` (what is asked of a GPU, and nothing else is,
by CuPy and torch.cuda), `world` (which
rank this is, and how ranks tell each other things before NCCL can), `bootstrap` (how ranks connect,
in bounded time), `nccl_group` (collectives, and dtypes on the way), `deadlines` (of what no caller
waits for), `messages` (found by their tags), `nccl_connections` (all of it, and how it breaks),
`nccl_communicator` (one step), `nccl_backend`.
"""
