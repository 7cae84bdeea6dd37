"""The SBP algebra, graph, compiler and contracts of sbp: one program, any parallelism."""
