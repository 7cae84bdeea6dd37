"""sbp boxing over torch.distributed: gloo on CPUs, NCCL on GPUs.

Read the modules in this order: `configs` (settings), `rendezvous` (who am I, where do we meet),
`clerk` (asks the store), `board` (notes of the ranks to each other), `group` (collectives and
messages of one set of ranks), `connections` (all groups, and how they break), `wire` (dtypes on the
way), `communicator` (one step), `backend`. What all backends of several processes share is in
`sbp_core.boxing`. Importing this package imports no torch.
"""
