"""Hydra config groups of sbp-planner."""
