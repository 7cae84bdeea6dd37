"""The backend `nccl`: boxing over NCCL, one process and one GPU a rank, through CuPy.

Read the modules in this order: `device` (what is asked of a GPU, and nothing else is),
`cupy_device` (the GPU by CuPy and torch.cuda: the only module that imports them), `world` (which
rank this is, and how ranks tell each other things before NCCL can), `bootstrap` (how ranks connect,
in bounded time), `wire` (dtypes on the way), `group` (collectives), `deadlines` (of what no caller
waits for), `messages` (found by their tags), `connections` (all of it, and how it breaks),
`communicator` (one step), `backend`.
"""
