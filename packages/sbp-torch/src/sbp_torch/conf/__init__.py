"""Hydra options of sbp-torch: `boxing=local`, `runtime=reference`."""
