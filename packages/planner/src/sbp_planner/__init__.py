"""The planners of sbp, from `manual` (pins, the rest inferred) to searches such as `osdp`."""
