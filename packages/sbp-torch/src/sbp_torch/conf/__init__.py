"""Hydra options of sbp-core: `boxing=local`, `runtime=reference`."""
