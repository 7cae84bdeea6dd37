"""Hydra options of sbp-boxing-nccl: `boxing=mpi` and `boxing=nccl`."""
