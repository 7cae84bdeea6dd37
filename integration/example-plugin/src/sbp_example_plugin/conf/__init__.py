"""Hydra config groups of sbp-example-plugin."""
