"""Hydra config groups of sbp-models."""
