"""An example plugin of sbp: one planner and one model."""
