"""An example plugin of sbp: one planner, one model, and one operator."""
