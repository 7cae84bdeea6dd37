"""The planners of sbp: `manual` (pins, the rest inferred) and `osdp` (sharding that has to be)."""
