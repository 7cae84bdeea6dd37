"""The actor runtime of sbp: registers, credits and static order, one set of threads a rank."""
