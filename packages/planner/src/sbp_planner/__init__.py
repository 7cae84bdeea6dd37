"""The cost model and the planners of sbp."""
