"""Hydra configs of sbp-launch: the primary configs, and options of its own groups."""
