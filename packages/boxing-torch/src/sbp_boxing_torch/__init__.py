"""sbp boxing over torch.distributed: gloo on CPUs, NCCL on GPUs.

Read the modules in this order: `configs` (settings), `rendezvous` (who am I, where do we meet),
`board` (notes of the ranks to each other), `group` (collectives and messages of one set of ranks),
`connections` (all groups, and how they break), `parcel` and `wire` (shards to flat messages and
back), `communicator` (one step), `backend`. Importing this package imports no torch.
"""
