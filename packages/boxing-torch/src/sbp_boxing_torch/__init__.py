"""sbp boxing over torch.distributed: gloo on CPUs, NCCL on GPUs.

Read the modules in this order: `configs` (settings), `rendezvous` (who am I, where do we meet),
`group` (collectives and messages of one set of ranks), `outbox` (messages on their way),
`connections` (all groups, and how they break), `wire` (dtypes on the way), `communicator` (one
step), `backend`. What all backends of several processes share is in `sbp_core.boxing`. Importing
this package imports no torch.
"""
