"""Hydra options of sbp-boxing-torch: `boxing=torch`."""
